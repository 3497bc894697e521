"""Parts that the tests of the contracts share."""

from dataclasses import dataclass

from flowrl.credit import branched_tree, gains, unit_values, zscore
from flowrl.probes import Branch, Call, Cost, Probe
from flowrl.worlds import MixtureWorld, PolicyOptions

DIRECTIONS = ["towards 45 degrees", "towards 90 degrees", "towards 200 degrees"]


def dense(values, decisions):
    return zscore(gains(values), over=("member",), mask=decisions.mask)


def tree_rule(advantages):
    """A rule of trees with `advantages(values [prompt, unit], tree)`."""

    class OfTrees:
        probe = Branch((2, 2))

        def assign(self, values, decisions):
            tree = branched_tree(decisions, "Rule")
            return tree.decision_table(advantages(unit_values(values, decisions, tree), tree))

    return OfTrees()


@dataclass(frozen=True)
class Brightness:
    channels: int = 3

    def score(self, images, prompts):
        return images[:, : self.channels].flatten(1).mean(1)


@dataclass(frozen=True)
class Own(Probe):
    """A probe as docs/guides/extend.md writes one: the mean of the one-step estimates of a node and
    of a point near it.
    """

    size: float = 0.1

    def estimate(self, run):
        times, estimates = run.trajectories.schedule.times, {}
        for node in run.nodes:
            x, v = run.start(node)
            noise = run.rand(len(x) // run.groups, *x.shape[1:]).flatten(0, 1)
            near = x + self.size * (noise - 0.5)
            velocity = run.velocity(near, (1000 * times[node]).expand(len(near)))
            estimates["state", node] = x - times[node] * v
            estimates["near", node] = near - times[node] * velocity
        return estimates

    def rewards(self, scored):
        both = {n: (scored.at(("state", n)), scored.at(("near", n))) for n in scored.nodes}
        return {node: (first + second) / 2 for node, (first, second) in both.items()}

    def cost(self, shape):
        rows = [shape.rows[node] for node in shape.nodes]
        return Cost([Call(count) for count in rows], 2 * sum(rows))


def mixture_policy():
    return MixtureWorld().policy(PolicyOptions())
