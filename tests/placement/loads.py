"""Loads of experts for tests of placements, equal on every machine."""

import random


def uniform(num_experts: int, seed: int) -> list[float]:
    """Draw independent loads of 0 to 1000."""
    numbers = random.Random(seed)
    return [1000 * numbers.random() for _ in range(num_experts)]


def zipf(num_experts: int, seed: int, exponent: float) -> list[float]:
    """Return loads by a Zipf law: the n-th of a random order has 1 / n ** exponent of the first."""
    numbers = random.Random(seed)
    order = sorted(range(num_experts), key=lambda _: numbers.random())
    return [1e6 / (place + 1) ** exponent for place in order]


def drawn(num_experts: int) -> dict[str, list[float]]:
    """Return the loads that are drawn, by name."""
    return {
        "uniform": uniform(num_experts, seed=1),
        "zipf_1.0": zipf(num_experts, seed=2, exponent=1.0),
        "zipf_1.5": zipf(num_experts, seed=3, exponent=1.5),
    }


def of_text(text: str, num_experts: int, top_k: int) -> list[float]:
    """Count the words of a text by expert; the router chooses experts by the word only."""
    loads = [0.0] * num_experts
    chosen: dict[str, list[int]] = {}
    for word in text.split():
        if word not in chosen:
            chosen[word] = random.Random(word).sample(range(num_experts), top_k)
        for expert in chosen[word]:
            loads[expert] += 1
    return loads
