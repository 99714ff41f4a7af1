"""The picture of two steps shows when the first rank sends and when it computes."""

from benchmarks.hosts.draw_exposed import STEPS, draw


def test_a_picture_shows_sends_and_waits_since_the_start_of_each_step() -> None:
    def event(name: str, start_ms: float, ms: float, **other: str) -> dict[str, object]:
        who = {"ph": "X", "pid": "rank 0", "tid": "caller", **other}
        return {**who, "name": name, "ts": start_ms * 1e3, "dur": ms * 1e3}

    first, second = STEPS
    figure = draw(
        [
            *(event(first, 100, 9), event("dispatch", 102, 3), event("combine", 108, 1)),
            *(event(second, 200, 6), event("dispatch_wait", 203, 1), event("experts", 204, 2)),
            event("dispatch of dispatcher 1", 201, 3, tid="transfers"),
            event("dispatch", 103, 3, pid="rank 1"),
        ]
    )
    titles = [panel.get_title(loc="left") for panel in figure.axes]
    assert titles == [f"{first}, 9 ms", f"{second}, 6 ms"]
    shown = [
        [
            [list(each.get_extents().intervalx) for each in bars.get_paths()]
            for bars in panel.collections
        ]
        for panel in figure.axes
    ]
    # Sends, the step and waits.
    exchanges = [[2, 5], [8, 9]]
    assert shown == [[exchanges, [[0, 9]], exchanges], [[[1, 4]], [[0, 6]], [[3, 4]]]]
