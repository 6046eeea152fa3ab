"""How the rows of a session, or of all ranks, enter the moments of a layer."""

from __future__ import annotations

import copy
from dataclasses import replace

from ness import distributed
from ness.statistics.gram import Gram
from ness.statistics.moments import GramSums, Moments
from ness.updates.layer_state import LayerState


def account(state: LayerState) -> Moments:
    """Where the rows of a session are booked, for `take`; this state does not change with it.

    It starts from what they are added to: the moments, or where several are to have them, from no rows.
    """
    start: Moments | None = state.moments
    if distributed.active():
        start = state.pending
    elif not _newest_are_all(state):
        start = None
    return state.no_rows() if start is None else copy.copy(start)


def take(state: LayerState, account: Moments, known: GramSums) -> None:
    """The session is complete: its rows count. `known`: sums of Grams that other layers have taken."""
    if distributed.active():
        state.pending = _booked(state.pending or state.no_rows(), account)
    elif _newest_are_all(state):
        newest = None if state.relative is None else state.relative.newest()
        state.moments = _booked(state.moments, account)
        if state.relative is not None and newest is not None:
            state.relative.fresh = _booked(newest, account)
    else:
        for target in _known(state):
            target.add_(account, known=known)


def _newest_are_all(state: LayerState) -> bool:
    """Whether all rows that were ever observed are the newest task's, so that one Gram does for both."""
    if state.relative is None:
        return True
    newest = state.relative.fresh
    return state.moments.gram is newest.gram if newest is not None else state.moments.gram.count == 0


def _known(state: LayerState) -> list[Moments]:
    """The moments that new rows enter."""
    return [state.moments] if state.relative is None else [state.moments, state.relative.newest()]


def reduce(state: LayerState, last: Gram | None = None) -> Gram:
    """Sum over all ranks what was not summed yet; a rank that saw nothing adds zeros.

    Moments add up against one anchor only, and a rank that did not observe has an older one: all take today's.

    Args:
        state: the layer.
        last: what the layer before was summed to; where this is the same bit for bit, they share it from now on.

    Returns:
        The summed Gram of what was pending.
    """
    state.rebase_anchor()
    pending = state.no_rows() if state.pending is None else copy.copy(state.pending)
    pending.gram, pending.square, pending.energy = (
        pending.gram.copy(),
        pending.square.clone(),
        pending.energy.clone(),
    )
    parts = [pending.gram.opened(), pending.square, pending.energy]
    if distributed.total(int(pending.cross is not None)):
        shape = state.layer.groups, state.layer.outputs, state.layer.width
        pending.cross = pending.square.new_zeros(shape) if pending.cross is None else pending.cross.clone()
        parts.append(pending.cross)
    distributed.sum_(parts)
    pending.gram.count = distributed.total(pending.gram.count)
    pending.calls = distributed.total(pending.calls)
    if last is not None and last.equals(pending.gram):
        pending.gram = last
    known: GramSums = {}
    for target in _known(state):
        target.add_(pending, known=known)
    state.pending = None
    return pending.gram


def _booked(moments: Moments, account: Moments) -> Moments:
    """The moments with the rows that an account has in the end."""
    return replace(moments, gram=account.gram, energy=account.energy, calls=account.calls)
