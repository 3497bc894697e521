r"""Typeset formulas of the reference, by the name under which a part is documented. Called by
conf.py.

Docstrings have the same formulas as plain text, for `help()` and the terminal; the pages show these
below the first paragraph. Notation: docs/reference/notation.md.
"""

MEAN = r"\operatorname{mean}"
STD = r"\operatorname{std}"
SDE_MEAN = (
    r"\mu = x\Big(1 - \frac{\sigma^2\Delta}{2t}\Big) - v\Big(1 +"
    r" \frac{\sigma^2(1-t)}{2t}\Big)\Delta"
)
PRESERVING = r"\mu = (1-s)\,\hat x_0 + \sqrt{s^2 - \sigma^2}\,\hat\varepsilon"
RHO = r"\rho"
CLIPPED = rf"{MEAN}\max\big(-A\rho,\ -A\operatorname{{clip}}(\rho, 1-c, 1+c)\big)"
KL = r"\beta\,\mathrm{KL}(\pi\,\|\,\pi_\text{ref})"

FORMULAS = {
    "flowrl.flow.interpolate": r"x_t = (1-t)\,x_0 + t\,\varepsilon",
    "flowrl.flow.velocity_target": r"v = \varepsilon - x_0",
    "flowrl.flow.tweedie": r"\hat x_0 = x_t - t\,v",
    "flowrl.flow.noise_estimate": r"\hat\varepsilon = x_t + (1-t)\,v",
    "flowrl.flow.uniform_schedule": r"t_j = 1 - j/T",
    "flowrl.flow.shifted_schedule": (
        r"t \leftarrow \frac{\alpha\,t}{1 + (\alpha - 1)\,t}, \qquad \alpha = \text{shift}"
    ),
    "flowrl.flow.log_prob": (
        rf"\log\pi(x) = {MEAN}\Big[-\frac{{(x-\mu)^2}}{{2\,\text{{std}}^2}} - \log\text{{std}} -"
        r" \tfrac12\log 2\pi\Big]"
    ),
    "flowrl.flow.log_prob_without_constants": rf"-{MEAN}\,(x-\mu)^2",
    "flowrl.flow.kl": (
        rf"\mathrm{{KL}}(p\,\|\,q) = {MEAN}\,\frac{{(\mu_p - \mu_q)^2}}{{2\,\text{{std}}_p^2}}"
    ),
    "flowrl.flow.sample": (
        r"x = \mu + \text{std}\;\varepsilon, \qquad \varepsilon \sim \mathcal N(0, I)"
    ),
    "flowrl.flow.GaussianMixture": (
        r"p_t(x) = \sum_k w_k\,\mathcal N\big((1-t)\,m_k,\ [(1-t)^2 s^2 + t^2]\,I\big)"
    ),
    "flowrl.samplers.FlowSDE": (
        rf"{SDE_MEAN}, \qquad \sigma = a\sqrt{{\frac{{t}}{{1-t}}}}, \qquad \text{{std}} ="
        r" \sigma\sqrt{\Delta}"
    ),
    "flowrl.samplers.DanceSDE": (
        rf"{SDE_MEAN}, \qquad \sigma = \eta, \qquad \text{{std}} = \eta\sqrt{{\Delta}}"
    ),
    "flowrl.samplers.CPS": (
        rf"{PRESERVING}, \qquad \text{{std}} = \sigma = s\,\sin\frac{{\eta\pi}}{{2}}"
    ),
    "flowrl.samplers.DDIMSDE": rf"{PRESERVING}, \qquad \text{{std}} = \sigma = a\,s\sqrt{{1-t}}",
    "flowrl.samplers.ExponentialSDE": (
        r"\mu = (1-s)\,\hat x_0 + s\,\rho\,\hat\varepsilon, \qquad \text{std} ="
        r" s\sqrt{1-\rho^2}, \qquad \rho = \Big(\frac{s\,(1-t)}{t\,(1-s)}\Big)^{a^2/2}"
    ),
    "flowrl.samplers.ODE": r"\mu = x - \Delta\,v, \qquad \text{std} = 0",
    "flowrl.credit.zscore": rf"Z(y) = \frac{{y - {MEAN}(y)}}{{{STD}(y) + 10^{{-4}}}}",
    "flowrl.credit.gains": r"g_i = R_{i+1} - R_i, \qquad \sum_i g_i = R_T - R_0",
    "flowrl.credit.reward_to_go": r"R_T - R_i",
    "flowrl.credit.generalised_gains": r"\sum_{k \ge 0} (\gamma\lambda)^k\, g_{i+k}",
    "flowrl.credit.Uniform": (
        rf"A_i = Z(R_T) \quad\text{{for every step }} i \qquad \text{{or}} \qquad"
        rf" \frac{{R_T - {MEAN}(R_T)}}{{{MEAN}(R_T)}} \text{{ (std=mean)}}"
    ),
    "flowrl.credit.StepwiseGain": (
        r"A_i = Z\Big(\sum_{k \ge 0} (\gamma\lambda)^k\, g_{i+k}\Big), \qquad g_i = R_{i+1} - R_i"
    ),
    "flowrl.credit.MovingAverageGain": (
        r"A_i = Z(g_i - b_i), \qquad b_i \leftarrow \text{decay}\; b_i + (1 -"
        r" \text{decay})\operatorname{mean}(g_i)"
    ),
    "flowrl.credit.GDPO": (
        rf"A = \frac{{S}}{{{STD}(S) + 10^{{-4}}}}, \qquad S = \sum_k w_k A^{{(k)}}"
    ),
    "flowrl.credit.turning_points": (
        r"\operatorname{sign}(d_{i-1})\operatorname{sign}(D) < 0 <"
        r" \operatorname{sign}(d_i)\operatorname{sign}(D),"
        r" \qquad d_i = R_{i+1} - R_i, \quad D = R_T - R_0"
    ),
    "flowrl.credit.TurningPoint": (
        r"A_i = Z(r_i), \qquad"
        r" r_i = \begin{cases} R_T - R_i & \text{at turning points} \\ R_{i+1} - R_i &"
        r" \text{elsewhere} \end{cases}"
    ),
    "flowrl.credit.process_rewards": (
        r"r_i = \begin{cases} R_T - R_i & i \text{ selected} \\ R_{i+1} - R_i & \text{otherwise}"
        r" \end{cases}"
    ),
    "flowrl.credit.DepthRelative": (
        rf"A(u) = \frac{{V(u) - {MEAN}_\text{{depth}}(V)}}{{{STD}_\text{{depth}}(V) + \epsilon}}"
    ),
    "flowrl.credit.SiblingRelative": (
        rf"A(u) = \frac{{V(u) - {MEAN}_\text{{siblings}}(V)}}{{{STD}_\text{{siblings}}(V) +"
        r" 10^{-4}}"
    ),
    "flowrl.credit.BackedUp": (
        r"A(\text{leaf}) = Z(R), \qquad A(u) = \sum_{c \in \text{children}(u)} w_c\,A(c)"
    ),
    "flowrl.losses.ClippedLoss": (
        rf"L = {CLIPPED} + {KL}, \qquad \rho = \frac{{\pi}}{{\pi_\text{{old}}}}, \qquad"
        rf" \mathrm{{KL}} = \frac{{w^2}}{{2}}{MEAN}\,(v - v_\text{{ref}})^2, \quad w ="
        r" \frac{|\partial\mu/\partial v|}{\text{std}}"
    ),
    "flowrl.losses.GSPO": (
        rf"L = {CLIPPED.replace(RHO, 's')} + {KL}, \qquad"
        r" s = \Big(\prod_k \rho_k^{w_k}\Big)^{1 / \sum_k w_k} \text{ over the transitions } k"
        r" \text{ of a trajectory}"
    ),
    "flowrl.losses.KLPenalty": (
        rf"L = {MEAN}\big(-A\rho +"
        rf" \text{{coefficient}}\;\mathrm{{KL}}(\pi\,\|\,\pi_\text{{old}})\big) + {KL}"
    ),
    "flowrl.losses.PolicyGradientLoss": rf"L = {MEAN}\big(-A\log\pi(x_s)\big) + {KL}",
    "flowrl.losses.FlowDPPO": (
        rf"L = {MEAN}\big(-A\rho\;M\big) + {KL}, \qquad"
        r" M = 0 \text{ if } \mathrm{KL}(\pi_\text{old}\,\|\,\pi) > \text{bound and } A(\rho - 1) >"
        r" 0, \text{ else } 1"
    ),
    "flowrl.losses.GRPOGuard": (
        r"L = \operatorname{mean}\frac{1}{\Delta}\max\big(-A\rho,\ -A\operatorname{clip}(\rho, 1-c,"
        r" 1+c)\big), \qquad"
        r" \log\rho = \text{std}\,\Big(\log\pi - \log\pi_\text{old} + \frac{|\mu -"
        r" \mu_\text{old}|^2}{2\,\text{std}^2}\Big)"
    ),
    "flowrl.losses.DiffusionNFT": (
        r"L = \frac{c}{\beta}\Big[r\,\frac{e(v^+)}{w^+} + (1-r)\,\frac{e(v^-)}{w^-}\Big] +"
        r" \lambda\,|v - v_\text{ref}|^2, \qquad"
        r" v^\pm = v_\text{old} \pm \beta\,(v - v_\text{old}), \quad r = \tfrac12 +"
        r" \tfrac{1}{2c}\operatorname{clip}(A, -c, c)"
    ),
    "flowrl.losses.AWM": (
        rf"L = {CLIPPED}, \qquad \rho = \exp(\log p - \log p_\text{{old}}), \quad \log p ="
        r" -w(t)\,f\big(|v - v^*|^2\big)"
    ),
    "flowrl.losses.DGPO": (
        r"L = \operatorname{mean}_i\,\operatorname{sigmoid}(S)\,A_i\,\ell_i(v), \qquad"
        r" S = \frac{\beta}{G}\sum_i A_i\,\big[\ell_i(v) - \ell_i(v_\text{ref})\big]"
    ),
    "flowrl.losses.CRD": (
        r"L = \frac{c}{\beta}\operatorname{mean}_i\big[\beta\,(r_i - \bar r) - (u_i -"
        r" \bar u)\big]^2 + \lambda f_i\,|v - v_\text{ref}|^2, \qquad"
        r" r_i = \ell_i(v_\text{old}) - \ell_i(v), \quad u_i = \tfrac12 +"
        r" \tfrac{1}{2c}\operatorname{clip}(A_i, -c, c)"
    ),
    "flowrl.losses.RewardAscent": (
        r"\nabla_\theta\, r = -\rho\sum_{k \in S} \Delta_k\,\frac{\partial r}{\partial x_0}"
        r"\,\frac{\partial v_k}{\partial\theta}, \qquad"
        r" \rho = 1 + y\,\Big(\frac{\sum_k\Delta_k}{\sum_{k \in S}\Delta_k} - 1\Big)"
    ),
    "flowrl.probes.Tweedie": r"R_j = R(z_j - t_j\,v_j)",
    "flowrl.probes.Continuation": r"R_j \approx V(z_j) = \mathbb E\big[R(z_T) \mid z_j\big]",
}
"""LaTeX by documented name."""
WIDE = 120
"""Formulas with more characters have a line for each part, so that they fit into the column."""
BREAK, LINE = r", \qquad", r", \\[0.5em]"


def with_formula(name: str, lines: list[str]) -> None:
    """Insert the formula of `name`, if there is one, below the first paragraph of its docstring."""
    if name in FORMULAS:
        end = next((number for number, line in enumerate(lines) if not line.strip()), len(lines))
        text = FORMULAS[name]
        if len(text) > WIDE:
            text = rf"\begin{{gathered}} {text.replace(BREAK, LINE)} \end{{gathered}}"
        lines[end:end] = ["", ".. math::", "", f"   {text}", ""]
