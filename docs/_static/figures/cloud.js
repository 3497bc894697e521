/* Gradients of batches in the 2-D world, with respect to a constant that is added to the velocity, and the share of each step.
   Numbers: flowrl/bench/gradients.py and flowrl/credit; tests/docs/test_figures.py compares them. */
"use strict";

(function (root) {
  const credit = root.flowrlCredit ?? require("../first-look/credit.js");
  const { DECISIONS, TIMES } = credit, DEGREES = 70, MEMBERS = 12, GROUPS = 300, BATCHES = 200;

  /** The mean gradient of each step along the exact one, [as published, not divided by std]; means of 20,000 groups. */
  const RECORDED = {
    "flow-grpo": [[0.03574, 0.06841, 0.08341, 0.08977, 0.08457, 0.06957, 0.05306, 0.03295, 0.02412], [0.01130, 0.02166, 0.02643, 0.02845, 0.02674, 0.02204, 0.01683, 0.01046, 0.00768]],
    gains: [[0.11075, 0.14280, 0.15176, 0.14905, 0.13276, 0.10685, 0.07823, 0.05335, 0.04197], [0.02241, 0.02897, 0.03091, 0.03026, 0.02691, 0.02160, 0.01565, 0.01057, 0.00826]],
    dense: [[0.06573, 0.08545, 0.11529, 0.13821, 0.15802, 0.17694, 0.19676, 0.21695, 0.25646], [0.02241, 0.02897, 0.03091, 0.03026, 0.02691, 0.02160, 0.01565, 0.01057, 0.00826]],
    tp: [[0.06048, 0.08338, 0.11429, 0.13736, 0.15678, 0.17490, 0.19424, 0.21349, 0.25646], [0.02560, 0.03165, 0.03452, 0.03359, 0.02942, 0.02323, 0.01659, 0.01105, 0.00826]],
    exact: [[0.11693, 0.22076, 0.26886, 0.28541, 0.26452, 0.21337, 0.15747, 0.10582, 0.08359], [0.01128, 0.02156, 0.02654, 0.02849, 0.02676, 0.02172, 0.01597, 0.01055, 0.00825]],
  };
  /** Direction of the exact gradient. */
  const DIRECTION = [-0.341601, -0.939845];

  /** Minus the mean of the others, step by step. */
  const centred = (table) => table.map((row) => row.map((value, k) => {
    const sum = table.reduce((all, other) => all + other[k], 0);
    return value - (sum - value) / (table.length - 1);
  }));

  /** Each rule: its name and colour, whether it needs exact values, its advantages as published, and its credit before any division. */
  const RULES = {
    "flow-grpo": ["Flow-GRPO", "flow-grpo", (values) => credit.advantages("flow-grpo", values), (values) => values.map((row) => row.slice(1).map(() => row.at(-1)))],
    gains: ["gains (Stepwise)", "stepwise", (values) => credit.advantages("gains", values), credit.gains],
    dense: ["gains, each step divided", "other", (values) => credit.stepScores(credit.gains(values)), credit.gains],
    tp: ["turning points (TP-GRPO)", "tp", (values) => credit.advantages("tp", values), (values) => {
      const turns = credit.selectedTurns(values), whole = credit.longTerm(values);
      return credit.gains(values).map((row, member) => row.map((gain, k) => (turns[member][k] ? whole[member][k] : gain)));
    }],
    exact: ["exact values", "line", (values) => credit.advantages("exact", values), credit.gains],
  };

  /** A function that draws a group with independent initial noise: the noise of the steps, the states, and both kinds of values. */
  function source(seed) {
    const normal = credit.normals(seed), pair = () => [normal(), normal()], goal = credit.target(DEGREES), tables = credit.exactTables(goal);
    return () => {
      const noise = Array.from({ length: MEMBERS }, () => Array.from({ length: DECISIONS }, pair));
      return group(noise, noise.map((own) => credit.path(pair(), own)), goal, tables);
    };
  }
  const group = (noise, paths, goal, tables) => ({ noise, completed: credit.completedValues(paths, goal), exact: credit.exactValues(paths, goal, tables) });

  /** d log pi / d constant is -drift z / std of every step. */
  const SLOPES = TIMES.slice(0, DECISIONS).map((t, k) => {
    const { drift, std } = credit.sdeFactors(t, TIMES[k + 1]);
    return -drift / std;
  });

  /** The policy gradient of a group by steps [step][axis], a mean over its members. */
  function gradients(own, rule, published) {
    const values = rule === "exact" ? own.exact : own.completed, [, , advantages, raw] = RULES[rule];
    const credits = published ? advantages(values) : centred(raw(values));
    return SLOPES.map((slope, k) => [0, 1].map((axis) => credits.reduce((sum, row, member) => sum + row[k] * slope * own.noise[member][k][axis], 0) / credits.length));
  }

  const summed = (steps) => [0, 1].map((axis) => steps.reduce((sum, step) => sum + step[axis], 0));
  const total = (steps) => steps.reduce((sum, value) => sum + value, 0);

  const api = { DEGREES, DIRECTION, RECORDED, RULES, gradients, group, source, summed };
  if (typeof module !== "undefined") { module.exports = api; return; }

  root.flowrlDraw.figure("cloud", (place, start) => {
    const { HALO, arrow, chart, element, onWidth, radios, range, says } = root.flowrlDraw;
    const state = { rule: "tp", published: true, count: 1, ...start }, exact = total(RECORDED.exact[1]);
    let drawn, width = 0;
    const update = (changes) => { Object.assign(state, changes); draw(); };
    const rules = radios("Credit", "fl-cloud-rule", Object.entries(RULES).map(([key, [name]]) => [key, name]), (rule) => update({ rule }));
    const kinds = radios("Normalisation", "fl-cloud-kind", [["yes", "as published"], ["", "not divided by std"]], (value) => update({ published: value === "yes" }));
    const count = range("Groups of 12 in a batch", { min: 1, max: 32, step: 1 }, (value) => update({ count: value }));
    const note = says(), charts = element("div", { class: "fl-two" });
    place.append(rules.set, element("div", { class: "fl-row" }, kinds.set, count.box), note, charts);

    /** Gradients of batches, in units of the exact gradient's length, along it and across. Their mean is the recorded one, their noise that of the drawn groups. */
    function batches() {
      const sums = drawn.map((own) => summed(gradients(own, state.rule, state.published))), recorded = total(RECORDED[state.rule][state.published ? 0 : 1]);
      const shift = summed(sums).map((c, axis) => recorded * DIRECTION[axis] - c / GROUPS), each = sums.map((g) => g.map((c, axis) => c + shift[axis]));
      const scale = state.published ? recorded : exact;
      let seed = 1;
      const pick = () => { seed = (seed * 48271) % 2147483647; return each[seed % GROUPS]; };
      return Array.from({ length: BATCHES }, () => {
        const sum = summed(Array.from({ length: state.count }, pick)).map((c) => c / state.count / scale);
        return [sum[0] * DIRECTION[0] + sum[1] * DIRECTION[1], sum[1] * DIRECTION[0] - sum[0] * DIRECTION[1]];
      });
    }

    function cloud(points, size, shade) {
      const height = Math.min(size * 0.8, 290), unit = 2.7, made = chart({ width: size, height, x: [0.8 - (unit * size) / height, 0.8 + (unit * size) / height], y: [-unit, unit],
        title: `Gradients of ${BATCHES} batches`, margins: [22, 0, 0, 0] });
      made.line([[-9, 0], [9, 0]], "stroke: var(--fl-grid)", 1);
      made.dots(points, 5, `stroke: ${shade}; opacity: 0.6`);
      made.add(arrow([made.x(0), made.y(0)], [made.x(1), made.y(0)], "stroke: var(--fl-ink)", 4));
      const mean = [state.published ? 1 : total(RECORDED[state.rule][1]) / exact, 0];
      made.dots([mean], 13, "stroke: var(--fl-back)");
      made.dots([mean], 9, `stroke: ${shade}`);
      made.text(0, 0, "exact gradient", { dy: 20, style: HALO });
      return made.svg;
    }

    function shares(size, shade) {
      const own = RECORDED[state.rule][state.published ? 0 : 1], whole = state.published ? total(own) : exact, right = RECORDED.exact[1].map((value) => value / exact);
      const made = chart({ width: size, height: 290, x: [-0.5, DECISIONS - 0.5], y: [0, 0.24], title: "Share of each step (line: exact)", yTicks: [[0, "0%"], [0.1, "10%"], [0.2, "20%"]],
        xTicks: own.map((_, k) => k), xTitle: "step", margins: [26, 4, 36, 40] });
      own.forEach((value, k) => made.rect(k - 0.36, k + 0.36, 0, value / whole, `fill: ${shade}; opacity: 0.8`));
      right.forEach((value, k) => made.line([[k - 0.46, value], [k + 0.46, value]], "stroke: var(--fl-ink)", 3));
      return made.svg;
    }

    function draw() {
      rules.show(state.rule);
      kinds.show(state.published ? "yes" : "");
      count.show(state.count, String(state.count));
      const points = batches(), size = width >= 600 ? (width - 16) / 2 : width, shade = `var(--fl-${RULES[state.rule][1]})`;
      charts.replaceChildren(cloud(points, size, shade), shares(size, shade));
      const angles = points.map(([along, across]) => (Math.abs(Math.atan2(across, along)) * 180) / Math.PI).sort((a, b) => a - b);
      const own = RECORDED[state.rule], factor = total(own[1]) / exact;
      note.textContent = `The gradient of a typical batch is ${Math.round(angles[BATCHES / 2])}° away from the exact one. `
        + (state.published ? `Step 0 has ${Math.round((100 * own[0][0]) / total(own[0]))}% of the mean gradient, and step 8 ${Math.round((100 * own[0][8]) / total(own[0]))}%; exact are ${Math.round((100 * RECORDED.exact[1][0]) / exact)}% and ${Math.round((100 * RECORDED.exact[1][8]) / exact)}%.`
          : `The mean (large dot) is ${factor.toFixed(2)} times the exact gradient.`);
    }

    note.textContent = `Computing ${GROUPS} groups ...`;
    setTimeout(() => {
      const next = source(7);
      drawn = [];
      (function more() {  // in parts, so that the page stays responsive
        for (let k = 0; k < 15; k++) drawn.push(next());
        if (drawn.length < GROUPS) setTimeout(more);
        else onWidth(charts, (now) => { width = now; draw(); });
      })();
    });
  });
})(typeof window === "undefined" ? globalThis : window);
