from tests.kernels.boolean_masks import boolean_masks

__all__ = ["boolean_masks"]
