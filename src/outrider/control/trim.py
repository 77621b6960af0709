"""The draft nodes that are verified: those that pay, by calibrated probability."""

from __future__ import annotations

from collections.abc import Mapping

from outrider.control import choose
from outrider.control.plan import Load, Try
from outrider.core.step import Batch, RowStep
from outrider.core.tree import ROOT


def keep_what_pays(batch: Batch, tries: Mapping[int, Try], load: Load) -> None:
    """Cut trees to the nodes of the whole batch that pay, and one of drafts of which little is known.

    tries: row of the batch -> its drafts, which get their expected accepted tokens.
    """
    trees = [(batch[r], tried) for r, tried in tries.items() if batch[r].tree.tokens]
    if len(trees) == 1 and trees[0][0].tree.chained and not trees[0][0].tree.probes:
        _trim_chain(batch, *trees[0], load)
        return
    joints = []
    for step, tried in trees:
        joint = choose.joint_probabilities(step.tree, tried.plan.state.calibration)
        joints.append(joint[: step.tree.size])
    costs = load.costs_of(sum([len(joint) for joint in joints]))
    kept = choose.select(joints, costs, load.rate)
    for (step, tried), nodes, joint in zip(trees, kept, joints):
        if tried.plan.tests and not nodes and joint:
            nodes = [0]
        if len(nodes) == len(joint):
            tried.expected = sum(joint)
        else:
            tried.expected = sum([joint[i] for i in nodes])
            keep(batch, step, nodes)


def _trim_chain(batch: Batch, step: RowStep, tried: Try, load: Load) -> None:
    """The same for a single chain, the usual case."""
    calibration = tried.plan.state.calibration
    count, tried.expected = choose.prefix(step.tree, calibration, load.verify, load.rate)
    if not count and tried.plan.tests:
        count, tried.expected = 1, choose.joint_probabilities(step.tree, calibration)[0]
    if count < step.tree.size:
        keep(batch, step, [*range(count)])


def keep(batch: Batch, step: RowStep, nodes: list[int]) -> None:
    """Cut the tree of a row to these nodes, and to its probes if all that they hang from is kept."""
    tree = step.tree
    present = {ROOT, *nodes}
    for i in range(tree.size, len(tree.tokens)):
        if tree.parents[i] in present:
            present.add(i)
            nodes.append(i)
    batch.cut(step, nodes)
