"""Likely wrong answers to the exercises: a text in the lesson's solution, what a student might write
instead, and a part of the hint.
"""

WRONG_ANSWERS = {
    "lesson_00": {
        "check_weakness": [
            ("blue square left of green triangle", "a cat on a mat", "does not know this prompt"),
            ("blue square left of green triangle", "red circle and blue square", "good at this"),
        ],
        "check_best_decision": [
            (".diff()", "", "highest score"),
            ("argmax", "argmin", "largest fall"),
        ],
        "check_blame": [
            ("stepwise-flow-grpo", "flow-grpo", "looks at the finished image only"),
            ('"stepwise-flow-grpo", ', "", "gives each decision its own gain"),
        ],
    },
    "lesson_01": {
        "check_interpolate": [("time[:, None]", "time", "time[:, None]")],
        "check_loss": [
            ("network(x,", "network(clean,", "given the clean data"),
            ("mean()", "mean().detach()", "do not detach"),
        ],
        "check_euler": [
            ("t.expand", "s.expand", "where the step starts"),
            ("stack(nodes)", "stack(nodes[:1])", "only the noise came back"),
        ],
        "check_tweedie": [("time[:, None]", "time", "time[:, None]")],
        "check_euler_error": [(".sqrt())", ".sqrt()) + 0.1", "must be 0")],
    },
    "lesson_02": {
        "check_score": [("/ t", "/ t**2", "t squared")],
        "check_flow_sde": [
            ("return mean, (variance * delta) ** 0.5", "return mean", "return two values"),
            ("return mean,", "return mean + torch.randn(7, 2),", "noise is not drawn"),
        ],
        "check_sde_ends": [
            ("+ std * torch.randn(x.shape, generator=generator)", "* 0 + x", "returned unchanged"),
            ("x.shape", "2", "of the shape of x"),
        ],
        "check_excess_variance": [(" - s**2", "", "subtract s squared")],
        "check_cps": [("eta * math.pi / 2", "eta", "radians")],
        "check_decisions": [
            ("10", "9", "takes a wrapper"),
            ("9", "10", "factor s at the last step"),
        ],
    },
    "lesson_03": {
        "check_log_prob": [
            ("0.5 * math.log(2 * math.pi)", "torch.log(2 * math.pi)", "module math"),
            (
                "squares / (2 * std**2) - std.log()",
                "(x - mean).square() / (2 * std[:, None] ** 2) - std[:, None].log()",
                "one number per sample",
            ),
        ],
        "check_gradient_samples": [("(rewards - baseline)", "rewards", "baseline is missing")],
        "check_group_advantage": [(" + 1e-4", "", "gives nan")],
        "check_clipped_loss": [
            ("mean()", "mean().detach()", "no gradient to the new"),
            ("mean()", "mean().item()", "leave out .item()"),
        ],
        "check_kl": [
            (
                "mean(dim=1) / (2 * std**2)",
                "mean(dim=1).div(2 * std**2).mean()",
                "not the mean over the batch",
            )
        ],
        "check_translated_clip": [
            ("(elements / own_elements)", "(own_elements / elements)", "inverse factor"),
            (" ** 0.5", "", "take the root"),
        ],
        "check_diagnosis": [
            ('1: "B", 2: "C"', '1: "C", 2: "B"', "nothing is clipped"),
            ('2: "C", 3: "A"', '2: "A", 3: "C"', "log 2 clips pairs"),
        ],
    },
    "lesson_04": {
        "check_uniform": [
            (" + 1e-4", "", "equal rewards gives NaN"),
            ("[:, :, None].repeat(1, 1, decisions)", "", "axis of decisions is missing"),
        ],
        "check_silent": [
            (
                "float((success**size + (1 - success) ** size).mean())",
                "success**size + (1 - success) ** size",
                "one share per prompt",
            )
        ],
        "check_cost": [("3 * ", "", "backward pass is missing")],
        "check_kl_from_velocities": [(".mean(dim=1)", ".mean()", "mean")],
        "check_kl_estimates": [
            (
                "return log_ratio, log_ratio.square() / 2, (-log_ratio)",
                "return (-log_ratio)",
                "three tensors",
            )
        ],
        "check_path_kl": [
            (
                "float(elements * step_kl.sum(dim=1).mean())",
                "elements * step_kl.sum(dim=1)",
                "return one number",
            )
        ],
        "check_pushing": [("far_down)", "far_down) * 1.0", "booleans are wanted")],
    },
    "lesson_05": {
        "check_gains": [
            ("values[..., 1:] - values[..., :-1]", "values - values[..., :1]", "one less"),
            ("values[..., 1:] - values[..., :-1]", "values.diff(dim=1)", "along another axis"),
        ],
        "check_figure_1": [
            ("3,", "8,", "g at 0.86: find the node"),
            ("5,", "2,", "g at 0.71: find the node"),
        ],
        "check_substeps": [
            ("t - k * length)", "torch.full((4,), t - k * length))", "one per sample"),
            ("k > 0", "True", "3 suffice"),
        ],
        "check_joint": [("unbiased=False", "unbiased=True", "unbiased=False")],
        "check_generalised": [("sums = torch.zeros_like(gained)", "sums = gained", "was changed")],
        "check_worth": [
            ("strong / (1 - strong) * (1 - weak) / weak", "strong / weak", "of the cosines")
        ],
    },
    "lesson_06": {
        "check_complete": [
            ("velocity(x, times[i])", "velocity(x, times[i].expand(len(x)))", "one per sample")
        ],
        "check_by_hand": [
            (
                '{"a": [2], "b": [2], "c": [0, 2]}',
                '{"a": [1], "b": [1], "c": [0]}',
                "decision 2, not 1",
            ),
            (
                '{"a": [2], "b": [2], "c": [0, 2]}',
                '{"a": [3], "b": [3], "c": [1, 3]}',
                "one too large",
            ),
        ],
        "check_plain": [("turns[..., 1:] = (along", "turns = (along", "fill decision 0")],
        "check_consistent": [("turns &= agrees", "", "plain")],
        "check_paper_labels": [
            ("{5: 0.35, 2: 0.45}", "{4: 0.35, 1: 0.45}", "one too small"),
            ("{5: 0.35, 2: 0.45}", "{5: -0.35, 2: -0.45}", "signs are wrong"),
        ],
        "check_balance": [("return turns & ((", "return ((", "keep the min")],
        "check_null": [
            (".sum(dim=-1).mean()", ".mean()", "share of decisions"),
            (
                "columns, generator=generator)",
                "columns, generator=generator).cumsum(-1)",
                "random walk",
            ),
        ],
    },
    "lesson_07": {
        "check_interval": [("return float(values.mean()), ", "return ", "return two numbers")],
        "check_permutation": [("- 1e-6", "+ 1e-6", "p = 0 cannot be")],
        "check_reach": [
            ("return math.nan", "return None", "not None"),
            ("return math.nan", "return float(cost[-1])", "return nan"),
        ],
        "check_tuned": [("tuning:].mean", ":].mean", "this reports all seeds")],
        "check_claims": [
            ('"C": "contradicted"', '"C": "supported"', "without any turning point"),
            ('"E": "open"', '"E": "supported"', "overhead per call"),
        ],
    },
    "lesson_08": {
        "check_mended": [
            ("Probe = Tweedie()", "Probe = Tweedie", "with brackets"),
            ("Tweedie()", "NoProbe()", "scores the finished sample only"),
        ],
        "check_to_go": [(", mask=decisions.mask", "", "mask=decisions.mask")],
        "check_rank": [
            (
                "below + (equal - 1) / 2",
                "final.argsort(1).argsort(1).to(final)",
                "share their mean rank",
            ),
            ("NoProbe()", "Tweedie()", "costs network evaluations"),
        ],
        "check_remembers": [
            (
                "self.decay * self.squares + (1 - self.decay) * new",
                "(1 - self.decay) * self.squares + self.decay * new",
                "average are swapped",
            ),
            (".clamp(-5, 5)", ".clamp(-10, 10)", "clamp them to ±5"),
        ],
    },
    "lesson_09": {
        "check_state_value": [
            ("range(node, steps)", "range(steps - node)", "the steps 1, 2, 3 follow")
        ],
        "check_mean_reward": [("area / budget", "area", "divide it by the budget")],
        "check_verdict": [
            ("-smallest < found.low and found.high", "abs(found.value)", "this one is wide"),
            (
                "adjusted < 0.05",
                "found.low > 0 or found.high < 0",
                "the corrected p-value is not below 0.05",
            ),
        ],
        "check_rate": [
            ("spread *", "spread / seeds**0.5 *", "each difference has the whole spread"),
            ("spread *", "spread**2 *", "the spread is squared"),
        ],
        "check_calibrated": [
            ("known.nanmean(dim=1, keepdim=True)", "0", "easy and hard prompts"),
            (", mask=decisions.mask", "", "outside the mask"),
        ],
    },
    "lesson_10": {
        "check_shifted": [("shift * u / (1 + (shift - 1)", "3 * u / (1 + 2", "change nothing")],
        "check_lora_parameters": [("rank * (out + wide)", "out * wide", "own weights")],
        "check_folded": [
            ("return A, B *", "B *= alpha / A.shape[0]\n    return A, B + 0 *", "in place")
        ],
        "check_guided": [("scale *", "4.5 *", "written into the function")],
        "check_arithmetic": [("math.ceil(groups / processes)", "groups", "over all processes")],
        "check_memory": [("* 4 /", "* 2 /", "would be bfloat16")],
        "check_iteration": [("(backward + 1)", "backward", "checkpointing is missing")],
    },
    "lesson_11": {
        "check_values": [("(rewards @ passes) / passes.sum(dim=0)", "rewards", "shape")],
        "check_siblings": [("unbiased=False", "unbiased=True", "NaN")],
        "check_shrinkage": [
            ("estimate - mean", "mean", "the share that is lost"),
            (
                "(total - estimate) / (k - 1) if leave_one_out else total / k",
                "total / k",
                "`leave_one_out` changes nothing",
            ),
        ],
        "check_shares": [(" / edges.sum()", "", "divide by their sum")],
        "check_evaluations": [
            ("states = 0, roots", "states = 0, 1", "for one root"),
            ("return total", "return total + states", "is the number of states"),
        ],
    },
    "lesson_12": {
        "check_target": [("x - x_next", "x + x_next", "this")],
        "check_branches": [
            ("r * positive + (1 - r) * negative", "r * negative + (1 - r) * positive", "swapped")
        ],
        "check_gradient": [("return 2 *", "return -2 *", "the sign is wrong")],
        "check_optimum": [
            ("curvature <= 0", "False", "is no minimum"),
            ("curvature <= 0", "(advantages < 0).any()", "there is a minimum"),
        ],
        "check_weights": [("s = beta", "s = -beta", "the sign of S")],
        "check_cost": [
            ("networks * ", "", "the current network only"),
            (
                "(2 if guided_sampling else 1) + draws * networks * (2 if guided_training else 1)",
                "1 + draws * networks",
                "guidance is missing",
            ),
        ],
    },
}
