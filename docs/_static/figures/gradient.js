/* The policy gradient of one Gaussian step in the plane, estimated from groups of draws.
   Numbers: flowrl/bench/gradients.py (RawCredit), flowrl/credit/uniform.py; the truth is a closed form; tests/docs/test_figures.py compares them. */
"use strict";

(function (root) {
  const credit = root.flowrlCredit ?? require("../first-look/credit.js");
  const STD = 0.5, TARGET = [1.2, 0.7], GROUPS = 2000, SHOWN = 300, LARGEST = 32;

  const BASELINES = {
    none: ["none", (rewards) => rewards],
    group: ["group mean", (rewards) => centred(rewards)],
    others: ["mean of the others", (rewards) => centred(rewards).map((gap) => (gap * rewards.length) / (rewards.length - 1))],
    grpo: ["GRPO: mean, and divided by std", (rewards) => credit.advantages("flow-grpo", rewards.map((r) => [0, r])).map(([a]) => a)],
  };
  const average = (numbers) => numbers.reduce((sum, number) => sum + number, 0) / numbers.length;
  const centred = (numbers) => {
    const mean = average(numbers);
    return numbers.map((number) => number - mean);
  };

  /** exp(-d^2 / 2) with the distance d to the target, plus an offset. */
  const reward = (x, offset) => Math.exp(-((x[0] - TARGET[0]) ** 2 + (x[1] - TARGET[1]) ** 2) / 2) + offset;

  /** The gradient of the expected reward in the mean of N(0, STD^2 I). */
  function truth() {
    const wide = 1 + STD * STD, mean = Math.exp(-(TARGET[0] ** 2 + TARGET[1] ** 2) / (2 * wide)) / wide;
    return TARGET.map((c) => (mean * c) / wide);
  }

  /** A x / STD^2 of every draw, in which A is its reward minus the baseline. */
  function terms(draws, offset, baseline) {
    const weights = BASELINES[baseline][1](draws.map((x) => reward(x, offset)));
    return draws.map((x, k) => ({ x, weight: weights[k], gradient: x.map((c) => (weights[k] * c) / (STD * STD)) }));
  }

  /** The mean over a group's draws. */
  const estimate = (draws, offset, baseline) => {
    const each = terms(draws, offset, baseline);
    return [0, 1].map((axis) => average(each.map(({ gradient }) => gradient[axis])));
  };

  /** Draws of groups [group][member]. */
  function draws(seed, groups) {
    const normal = credit.normals(seed);
    return Array.from({ length: groups }, () => Array.from({ length: LARGEST }, () => [STD * normal(), STD * normal()]));
  }

  /** Length of the mean estimate along the truth, and rms distance of one estimate from the mean, both as a share of the truth's length. */
  function quality(estimates) {
    const exact = truth(), length = Math.hypot(...exact), mean = [0, 1].map((axis) => average(estimates.map((g) => g[axis])));
    const spread = Math.sqrt(average(estimates.map((g) => (g[0] - mean[0]) ** 2 + (g[1] - mean[1]) ** 2)));
    return { mean, along: (mean[0] * exact[0] + mean[1] * exact[1]) / length ** 2, spread: spread / length };
  }

  const api = { draws, estimate, quality, terms, truth };
  if (typeof module !== "undefined") { module.exports = api; return; }

  root.flowrlDraw.figure("gradient", (place) => {
    const { arrow, button, chart, element, onWidth, radios, range, says } = root.flowrlDraw;
    const state = { baseline: "group", members: 6, offset: 0, seed: 3 }, REACH = 2.1;
    let drawn = draws(state.seed, GROUPS), width = 0;
    const update = (changes) => { Object.assign(state, changes); draw(); };
    const baselines = radios("Baseline", "fl-baseline", Object.entries(BASELINES).map(([key, [name]]) => [key, name]), (baseline) => update({ baseline }));
    const members = range("Group size", { min: 2, max: LARGEST, step: 1 }, (value) => update({ members: value }));
    const offset = range("Reward offset", { min: 0, max: 5, step: 0.5 }, (value) => update({ offset: value }));
    const again = button("New draws", () => { state.seed += 1; drawn = draws(state.seed, GROUPS); draw(); });
    const note = says(), charts = element("div", { class: "fl-two" });
    place.append(baselines.set, element("div", { class: "fl-row" }, members.box, offset.box, again), note, charts);

    function plane(title, size) {
      const across = Math.min(size, 340), made = chart({ width: size, height: across * 0.86 + 22, x: [(-REACH * size) / across, (REACH * size) / across], y: [-REACH * 0.86, REACH * 0.86],
        title, margins: [22, 0, 0, 0] });
      const to = ([x, y]) => [made.x(x), made.y(y)];
      return { made, point: (from, end, style, strength) => made.add(arrow(to(from), to(end), style, strength)) };
    }

    function one(size) {
      const { made, point } = plane(`One group: ${state.members} draws`, size), group = drawn[0].slice(0, state.members), unit = made.x(1) - made.x(0);
      for (const radius of [1.5, 1, 0.5]) {
        made.add(element("circle", { cx: made.x(TARGET[0]), cy: made.y(TARGET[1]), r: radius * unit, style: "fill: var(--fl-star); opacity: 0.1" }));
      }
      made.text(...TARGET, "high reward", { "text-anchor": "middle", dy: 4, class: "fl-soft" });
      made.add(element("circle", { cx: made.x(0), cy: made.y(0), r: 2 * STD * unit, style: "fill: none; stroke: var(--fl-grid)", "stroke-width": 1.5 }));
      const each = terms(group, state.offset, state.baseline), largest = Math.max(...each.map(({ weight }) => Math.abs(weight)), 1e-9);
      for (const { x, weight } of each) {
        const share = (0.9 * weight) / largest, length = Math.hypot(...x);
        point(x, x.map((c) => c + (share * c) / length), `stroke: var(--fl-${weight < 0 ? "down" : "up"})`, 2);
        made.dots([x], 7, "stroke: var(--fl-ink)");
      }
      return made.svg;
    }

    function cloud(estimates, mean, size) {
      const exact = Math.hypot(...truth()), factor = state.baseline === "grpo" ? exact / Math.hypot(...mean) : 1;
      const sizes = estimates.map((g) => (1.25 * factor * Math.hypot(...g)) / exact).sort((a, b) => a - b);
      const zoom = [1, 2, 4, 8, 16, 32].find((z) => sizes[Math.floor(0.85 * sizes.length)] < REACH * z) ?? 64, scale = 1.25 / exact / zoom;
      const { made, point } = plane(`${SHOWN} groups: their gradients${zoom > 1 ? `, drawn at 1/${zoom}` : ""}`, size), end = (g) => g.map((c) => c * scale * factor);
      estimates.slice(0, 60).forEach((g) => made.line([[0, 0], end(g)], "stroke: var(--fl-up); opacity: 0.2", 1));
      made.dots(estimates.slice(0, SHOWN).map(end), 4, "stroke: var(--fl-up); opacity: 0.55");
      point([0, 0], truth().map((c) => c * scale), "stroke: var(--fl-ink)", 4);
      return made.svg;
    }

    function draw() {
      baselines.show(state.baseline);
      members.show(state.members, String(state.members));
      offset.show(state.offset, state.offset.toFixed(1));
      const estimates = drawn.map((group) => estimate(group.slice(0, state.members), state.offset, state.baseline));
      const { mean, along, spread } = quality(estimates), size = width >= 600 ? (width - 16) / 2 : width;
      charts.replaceChildren(one(size), cloud(estimates, mean, size));
      note.textContent = state.baseline === "grpo"
        ? `Division by the group's standard deviation changes the unit: the mean is ${along.toFixed(1)} times the exact gradient (thick arrow), and one group is off by ${(spread / along).toFixed(1)} times the mean. The cloud is drawn with the mean's length.`
        : `The mean of the groups is ${along.toFixed(2)} times the exact gradient (thick arrow), and one group is off by ${spread.toFixed(1)} times its length. Blue draws become more likely, orange ones less likely.`;
    }

    onWidth(charts, (now) => { width = now; draw(); });
  });
})(typeof window === "undefined" ? globalThis : window);
