"""Checks of what parties send, made by the server before anything of it moves the state."""

from collections.abc import Mapping
from typing import Any

import torch

from pfedhn.algorithm import Extra
from pfedhn.deploy.questions import Question
from pfedhn.deploy.signing import PublicKey, opened
from pfedhn.deploy.state import ServerState
from pfedhn.deploy.wire import Message, WireError, is_finite, layout, norm
from pfedhn.engine.plan import Plan
from pfedhn.engine.state import EVALUATED_SPLITS
from pfedhn.model import Model
from pfedhn.params import Params

MAX_COUNT = 1 << 40  # of examples and rounds
MAX_LOSS = 1e300  # summed over examples; a sum over parties stays finite


class TooLarge(WireError):
    """An update whose norm is above the bound of the policy."""

    def __init__(self, length: float, most: float) -> None:
        super().__init__("norm", f"sent an update of norm {length:.3g} where {most:.3g} is the most")
        self.ratio = length / most


def verified(content: bytes, name: str, run: str, key: PublicKey | None, question: Question | None) -> Message:
    """A party's message, if it is signed and answers the question; the cheap checks and the signature come first.

    `key` is the public key of the party that it is said to come from, None if that is not enrolled; `question` is the
    open one of this kind, None if there is none.
    """
    if key is None:
        raise WireError("stranger", "is not enrolled")
    if question is None:  # not even read: its size has no limit
        raise WireError("late", "answered what nobody asks any more")
    message = opened(content, key, question.limit)
    if message.run != run or message.party != name:
        raise WireError("run", f"sent a message of {message.party!r:.80} in the run {message.run!r:.80}")
    if message.kind == "refusal" and message.values.get("of") == question.kind:
        if message.values.get("round") not in (None, question.values.get("round")):
            raise WireError("round", "refuses what is not asked")
        return message
    if message.kind != question.kind:
        raise WireError("kind", f"answered with {message.kind!r:.80} what asked for {question.kind!r}")
    for part, value in question.values.items():
        found = message.values.get(part)
        if found != value or type(found) is not type(value):
            reason = part if part == "size" else "round"  # all other values identify the question
            raise WireError(reason, f"answered with the {part} {found!s:.40} where {value} was asked")
    return message


def check_answer(
    message: Message, question: Question, plan: Plan, state: ServerState, max_staleness: int | None
) -> None:
    """Refuse a verified answer that the state must not take; an update may be `max_staleness` steps behind."""
    if message.kind == "refusal":
        return
    if message.kind == "hello":
        _check_hello(message, plan, state)
        return
    member = state.members[message.party]
    splits = EVALUATED_SPLITS if message.kind in ("evaluate", "compare") else ("validation",)
    examples = {split: member.examples[split] for split in splits}
    check_scores(message, examples, plan.models[member.architecture].per_example_metric is not None)
    if message.kind == "train":
        check_update(message, question, plan, state, max_staleness)


def _check_hello(message: Message, plan: Plan, state: ServerState) -> None:
    architecture, size, examples = (message.values.get(part) for part in ("architecture", "size", "examples"))
    is_known = isinstance(architecture, str) and architecture in plan.models
    are_counted = isinstance(examples, dict) and examples.keys() == set(EVALUATED_SPLITS)
    counts = [size, *examples.values()] if isinstance(examples, dict) else []
    is_possible = all(type(count) is int and 0 <= count < MAX_COUNT for count in counts) and size != 0
    if not is_known or not are_counted or not is_possible:
        raise WireError("hello", "describes its network or its examples in a way that cannot be read")
    known = state.members.get(message.party)
    if known is not None and known.architecture != architecture:  # its row and its updates have that size
        raise WireError("hello", f"says the size {architecture!r} and takes part with {known.architecture!r}")
    if plan.algorithm.needs.descriptors and not _is_descriptor(message.tensors, str(architecture), plan, state):
        raise WireError("hello", "sent no descriptor that this method can use")


def _is_descriptor(descriptor: Any, architecture: str, plan: Plan, state: ServerState) -> bool:
    """Whether the method can make a party's weights from this descriptor."""
    if not isinstance(descriptor, torch.Tensor) or (descriptor.dim(), descriptor.dtype) != (1, plan.dtype):
        return False
    try:
        row = plan.first_row(state.shared, torch.tensor(0), descriptor)
        plan.exchange.sent(plan.models[architecture], state.shared, row)
    except RuntimeError:  # of another length
        return False
    return is_finite(descriptor)


def check_update(
    message: Message, question: Question, plan: Plan, state: ServerState, max_staleness: int | None
) -> None:
    """Refuse an update of another layout, one that is not finite or too large, and one that is too old."""
    model = plan.models[state.members[message.party].architecture]
    extras = plan.extras[model.name].up
    if layout(message.tensors) != question.layout:
        _refuse_layout_of_extras(message.tensors, model, extras)
        raise WireError("layout", "sent an update of other shapes or types than the network has")
    update = plan.upload.decode(message.tensors, model.dtype)
    _check_extras(update, extras)
    if not is_finite(message.tensors):
        raise WireError("finite", "sent an update that is not finite")
    update = {name: value for name, value in update.items() if name not in extras}
    if not (length := norm(update)) <= question.max_norm:
        raise TooLarge(length, question.max_norm)
    stale = state.round - question.values["version"]
    if max_staleness is not None and stale > max_staleness:
        raise WireError("stale", f"answered weights that are {stale} steps old")


def _refuse_layout_of_extras(tensors: Any, model: Model, extras: Mapping[str, Extra]) -> None:
    """Name the extra that makes the layout of an update wrong, if it is one."""
    found = tensors if isinstance(tensors, dict) else {}
    for name, value in found.items():
        if name not in extras and name not in model.shapes and name not in model.statistics:
            raise WireError("extra", f"sent the extra {name!r:.80}, which this run does not have")
        if name in extras and isinstance(value, torch.Tensor) and value.shape != extras[name].shape:
            shapes = f"{tuple(value.shape)!s:.80} where {tuple(extras[name].shape)}"
            raise WireError("extra", f"sent the extra {name!r} of shape {shapes} was asked")
    if found and (missing := [name for name in extras if name not in found]):
        raise WireError("extra", f"did not send the extra {missing[0]!r}")


def _check_extras(update: Params, extras: Mapping[str, Extra]) -> None:
    """Refuse extras that are not finite or too large."""
    for name, extra in extras.items():
        if not is_finite(update[name]):
            raise WireError("extra", f"sent the extra {name!r}, which is not finite")
        if (length := norm(update[name])) > extra.max_norm:
            norms = f"{length:.3g} where {extra.max_norm:.3g} is the most"
            raise WireError("extra", f"sent the extra {name!r} of norm {norms}")


def check_scores(message: Message, examples: Mapping[str, int], has_metric: bool) -> None:
    """Refuse scores that no examples can give: the round is chosen by them.

    They are over all `examples` that the party said that it has, by split, or over none if it keeps them to itself:
    otherwise it could make its own count for more than those of all others.
    """
    scores = message.values.get("scores")
    if not isinstance(scores, dict) or scores.keys() != examples.keys():
        raise WireError("scores", "sent scores that cannot be read")
    for split, values in scores.items():
        if not isinstance(values, list) or list(map(type, values)) != [float, float if has_metric else type(None), int]:
            raise WireError("scores", "sent scores that cannot be read")
        loss, metric, count = values
        if count not in (0, examples[split]):
            raise WireError("scores", f"sent scores of {count!s:.20} examples and has {examples[split]}")
        if not (0 <= loss <= (MAX_LOSS if count else 0) and 0 <= (metric or 0) <= count):
            raise WireError("scores", f"sent scores that {count} examples cannot have")
