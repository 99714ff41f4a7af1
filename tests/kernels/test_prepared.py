"""The driver's arguments in a repeated launch, and the calls that Triton must prepare again."""

import ctypes
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import cast

import pytest
import torch

pytest.importorskip("triton")
from epcomm.kernels import prepared
from epcomm.kernels.prepared import CHANGES, CompiledKernel, DirectLaunch, Driver, PreparedLaunch

# x, table, weights, rank, num_tokens, address; the kernel was compiled without weights.
NAMES = ["x_ptr", "table_ptr", "weights_ptr", "rank", "num_tokens", "address", "WIDTH"]
TYPES = ["*bf16", "*i64", "constexpr", "i32", "i32", "i64"]
ADDRESS = 2**40 + 16


def compiled(**metadata: object) -> CompiledKernel:
    fields = {"num_warps": 4, "shared": 512, "launch_pdl": True} | metadata
    signature = dict(zip(NAMES, [*TYPES, "constexpr"], strict=True))
    kernel = SimpleNamespace(
        function=77, metadata=SimpleNamespace(**fields), src=SimpleNamespace(signature=signature)
    )
    return cast(CompiledKernel, kernel)


class FakeDriver:
    """Reads the arguments of a launch immediately, as the driver does."""

    def __init__(self) -> None:
        self.current, self.status = 0, 0
        self.seen: list[object] = []

    def launch(
        self,
        config: SimpleNamespace,
        function: ctypes.c_void_p,
        parameters: ctypes.Array[ctypes.c_void_p],
        extra: None,
    ) -> int:
        fields = config._obj
        kinds = (ctypes.c_uint64, ctypes.c_uint64, ctypes.c_int32, ctypes.c_int32, ctypes.c_int64)
        values = [
            kind.from_address(address).value
            for kind, address in zip((*kinds, ctypes.c_uint64), parameters, strict=True)
        ]
        attribute = fields.attributes.contents.id
        launched = (fields.grid_x, fields.block_x, fields.shared_bytes, fields.stream)
        self.seen.append((function.value, launched, fields.num_attributes * attribute, values))
        return self.status

    def calls(self) -> Driver:
        return Driver(launch=self.launch, device=lambda: self.current, stream=lambda _: 1234)


def rows(offset: int = 0) -> torch.Tensor:
    memory = torch.zeros(64, dtype=torch.bfloat16)
    begin = -memory.data_ptr() % 16 // 2 + offset
    return memory[begin : begin + 16]


def prepared_with(
    driver: FakeDriver, x: torch.Tensor | None = None
) -> tuple[DirectLaunch, torch.Tensor]:
    table = torch.zeros(4, dtype=torch.int64)
    launch = DirectLaunch(
        compiled(),
        [rows() if x is None else x, table, None, 3, 5, ADDRESS],
        [CHANGES, None, CHANGES, None, CHANGES, None],
        TYPES,
        num_scratch=1,
        device_index=0,
        calls=driver.calls(),
    )
    return launch, table


def test_driver_finds_what_changed_beside_what_stays() -> None:
    driver = FakeDriver()
    launch, table = prepared_with(driver)
    for x, num_tokens, grid in ((rows(), 5, 2), (rows(8), -1, 9)):
        assert launch.launch(grid, (x, None, num_tokens))
        wanted = [x.data_ptr(), table.data_ptr(), 3, num_tokens, ADDRESS, 0]
        assert driver.seen.pop() == (77, (grid, 128, 512, 1234), 6, wanted)


def test_tensors_that_change_are_not_kept_alive() -> None:
    x = rows()
    is_alive = weakref.ref(x)
    launch, _ = prepared_with(FakeDriver(), x)
    del x
    assert is_alive() is None
    assert launch.launch(1, (rows(), None, 1))


@pytest.mark.parametrize(
    "changing",
    [
        pytest.param((rows(1), None, 1), id="address between multiples of 16"),
        pytest.param((rows().float(), None, 1), id="other dtype"),
        pytest.param((None, None, 1), id="tensor left out"),
        pytest.param((rows(), rows(), 1), id="tensor that the kernel does not have"),
        pytest.param((rows(), None, 2**31), id="integer of more bytes"),
    ],
)
def test_other_variants_are_left_to_triton(changing: tuple[torch.Tensor | int | None, ...]) -> None:
    driver = FakeDriver()
    launch, _ = prepared_with(driver)
    assert not launch.launch(1, changing)
    assert not driver.seen


def test_other_devices_and_refusals_are_left_to_triton() -> None:
    driver = FakeDriver()
    launch, _ = prepared_with(driver)
    driver.current = 1
    assert not launch.launch(1, (rows(), None, 1))
    driver.current, driver.status = 0, 201
    assert not launch.launch(1, (rows(), None, 1))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"global_scratch_size": 8}, "global_scratch_size is 8"),
        ({"num_ctas": 2}, "num_ctas is 2"),
        ({"launch_cooperative_grid": True}, "launch_cooperative_grid is True"),
    ],
)
def test_kernels_that_need_more_than_arguments_are_left_to_triton(
    change: dict[str, object], reason: str
) -> None:
    kernel = compiled(**change)
    with pytest.raises(prepared.UnpreparedError, match=reason):
        prepared.types_of(kernel, NAMES, 6)


def test_types_that_are_not_known_are_left_to_triton() -> None:
    kernel = compiled()
    assert prepared.types_of(kernel, NAMES, 6) == TYPES
    kernel.src.signature["table_ptr"] = "tensordesc<bf16[1,1]>"
    with pytest.raises(prepared.UnpreparedError, match="signature"):
        prepared.types_of(kernel, NAMES, 6)
    kernel.src.signature.update(table_ptr="*i64", WIDTH="i32")
    with pytest.raises(prepared.UnpreparedError, match="signature"):
        prepared.types_of(kernel, NAMES, 6)


def test_members_of_tuples_are_arguments_of_their_own() -> None:
    kernel = compiled()
    kernel.src.signature["table_ptr"] = ("*i64", "constexpr")
    kinds = [*TYPES[:1], "*i64", "constexpr", *TYPES[2:]]
    assert prepared.types_of(kernel, NAMES, 7) == kinds
    params = [SimpleNamespace(name="peers", do_not_specialize=True)]
    prepared._check_integers([(rows(), None)], params)
    with pytest.raises(prepared.UnpreparedError, match="specialised for peers"):
        prepared._check_integers([(rows(), 3)], params)


@pytest.mark.parametrize(
    ("found", "num_scratch"), [([8, 8, 4, 4, 8], 0), ([8, 8, 4, 4, 8, 8, 8], 2)]
)
def test_driver_is_asked_what_the_kernel_takes(
    found: list[int], num_scratch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ask(_: object, place: ctypes.c_size_t, __: object, size: SimpleNamespace) -> int:
        if place.value >= len(found):
            return 1
        size._obj.value = found[place.value]
        return 0

    monkeypatch.setattr(prepared, "driver", lambda: SimpleNamespace(cuFuncGetParamInfo=ask))
    types = ["*fp32", "i64", "constexpr", "i32", "u32", "u64"]
    assert prepared._num_scratch(compiled(), types) == num_scratch
    found[2] = 8
    with pytest.raises(prepared.UnpreparedError, match="parameters"):
        prepared._num_scratch(compiled(), types)


def test_interpreted_kernels_are_launched_in_order_of_their_parameters() -> None:
    seen: list[object] = []

    class Kernel:
        def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
            return lambda *arguments, **constants: seen.append((grid, arguments, constants))

    x, table = rows(), torch.zeros(1)
    launch = PreparedLaunch(Kernel(), (CHANGES, (table, None), None, CHANGES), {"WIDTH": 2})
    launch(3, x, 7)
    assert seen == [((3,), (x, (table, None), None, 7), {"WIDTH": 2})]
