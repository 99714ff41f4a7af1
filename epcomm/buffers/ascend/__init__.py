"""Move tokens by the vendor packages for Ascend NPUs."""
