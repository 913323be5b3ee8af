"""The learning rate of a step: linear warm-up, then a cosine down to the minimum. A pure function of the step number."""

from __future__ import annotations

from math import cos, pi

from orchestrator.domain.ids import Step
from orchestrator.domain.spec import TrainSpec


def learning_rate(train: TrainSpec, step: Step) -> float:
    """For steps 1..train.steps: reaches the peak at step `warmup_steps` and the minimum at the last step."""
    if step <= train.warmup_steps:
        return train.learning_rate * (step / train.warmup_steps)
    span = max(1, train.steps - train.warmup_steps)
    progress = min(1.0, (step - train.warmup_steps) / span)
    return train.min_learning_rate + (train.learning_rate - train.min_learning_rate) * 0.5 * (1.0 + cos(pi * progress))
