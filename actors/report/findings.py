"""Finds in a run's data what looks like a reward hack or an unstable run, so that nobody has to search for it.

The rules compare numbers and know nothing of the task. So a finding is a reason to look, not a verdict.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from slimefsdp.monitoring.panels import Series

HELD_OUT = "Held-out prompts"
END = 0.1  # the beginning and the end of a run are this share of its points
RISE = 0.1  # smallest rise of the training reward, as a share of its largest absolute value
FALL = 0.1  # smallest fall of a held-out score below its best earlier value, as a share of the largest absolute value
LONGER, SHORTER = 1.5, 0.5  # end of the response length / its beginning
MORE_CUT = 0.1  # rise of the share of truncated responses
ENTROPY_LEFT = 0.1  # end of the entropy / its beginning
COMPARED_TEXT = 40  # characters of a response's beginning and of its end
SAME_TEXT, MORE_SAME_TEXT = 0.5, 0.25  # share of responses with the commonest of these texts, and its rise
FEWEST_RESPONSES = 8
# metric -> (heading of its panel, smallest value of a jump, smallest ratio of a jump to the run's median)
JUMPS = {
    "kl_ref": ("KL to the reference model", 0.5, 10.0),
    "kl_old": ("KL to the policy before the step", 0.1, 10.0),
    "rollout_mismatch_max": ("Mismatch of rollout and trainer", 0.5, 10.0),
}
_NO_SCORES = ("finished", "_low", "_high")  # ends of names of held-out metrics that are not compared with the reward


@dataclass(frozen=True, slots=True)
class Finding:
    text: str
    target: str  # the heading of the chart that shows it, or HELD_OUT


def findings_of(series: Mapping[str, Series], first: Sequence[str] = (), last: Sequence[str] = ()) -> Iterator[Finding]:
    """Yields what is conspicuous in a run.

    Args:
        series: the run's metrics by name.
        first: all responses of the first evaluation.
        last: all responses of the last evaluation.
    """
    reward = series.get("rollout/reward")
    if reward is not None and _change(reward) >= RISE:
        yield from _against_the_reward(series, reward)
    if (entropy := series.get("entropy")) is not None:
        before, after = _ends(entropy)
        if before > 0 and after <= ENTROPY_LEFT * before:
            yield Finding(f"The entropy collapses from {before:.3g} to {after:.3g} nats.", "Entropy of the policy")
    for name, (heading, floor, ratio) in JUMPS.items():
        if (line := series.get(name)) is None:
            continue
        top = int(line.values.argmax())
        usual = float(np.median(line.values))
        if line.values[top] >= max(floor, ratio * usual):
            text = f"{heading}: {line.values[top]:.3g} in step {line.steps[top]:.0f}, {usual:.2g} in the median step."
            yield Finding(text, heading)
    yield from _repeated(first, last)


def _against_the_reward(series: Mapping[str, Series], reward: Series) -> Iterator[Finding]:
    """Yields what gets worse while the training reward rises."""
    rise = "The training reward rises from {:.3g} to {:.3g}, while ".format(*_ends(reward))
    for name, line in series.items():
        if not name.startswith("eval/") or name.endswith(_NO_SCORES) or "/ended_by_" in name or len(line.values) < 2:
            continue
        best, last = float(line.values[:-1].max()), float(line.values[-1])
        if best - last >= FALL * float(np.abs(line.values).max()) > 0:
            parts = name.removeprefix("eval/").rpartition("/")
            text = f"held-out {' '.join(filter(None, (parts[0], parts[2])))} falls from {best:.3g} to {last:.3g}."
            yield Finding(rise + text, "Held-out")
    if length := series.get("rollout/response_length"):
        before, after = _ends(length)
        if before > 0 and not SHORTER < after / before < LONGER:
            text = f"responses become {'longer' if after > before else 'shorter'}: {before:.4g} to {after:.4g} tokens."
            yield Finding(rise + text, "Response length")
    if cut := series.get("rollout/truncated"):
        before, after = _ends(cut)
        if after - before >= MORE_CUT:
            yield Finding(f"{rise}more responses are cut: {before:.0%} to {after:.0%}.", "Truncated responses")


def _repeated(first: Sequence[str], last: Sequence[str]) -> Iterator[Finding]:
    """Yields the beginning or end that most responses of the last evaluation share, if it became common only later."""
    if len(last) < FEWEST_RESPONSES:
        return
    for where, part in (("begin", slice(COMPARED_TEXT)), ("end", slice(-COMPARED_TEXT, None))):
        text, count = Counter(response.strip()[part] for response in last).most_common(1)[0]
        share = count / len(last)
        earlier = sum(response.strip()[part] == text for response in first) / max(1, len(first))
        if share >= SAME_TEXT and share - earlier >= MORE_SAME_TEXT:
            was = f"; {earlier:.0%} in the first" if first else ""
            yield Finding(f"{share:.0%} of the last evaluation's responses {where} alike{was}: {text!r}", HELD_OUT)
            return  # a text that is repeated as a whole also ends alike


def _ends(line: Series) -> tuple[float, float]:
    """Returns the means of a line's beginning and of its end."""
    points = max(1, int(END * len(line.values)))
    return float(line.values[:points].mean()), float(line.values[-points:].mean())


def _change(line: Series) -> float:
    """Returns how much a line rises, as a share of its largest absolute value."""
    before, after = _ends(line)
    return (after - before) / (float(np.abs(line.values).max()) or 1.0)
