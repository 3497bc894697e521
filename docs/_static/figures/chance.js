/* Comparisons of two rules on n seeds: how often an interval covers the true difference, and how often it excludes 0.
   Numbers: flowrl/run/statistics.py (Student's interval of paired differences); tests/docs/test_figures.py compares them. */
"use strict";

(function (root) {
  const credit = root.flowrlCredit ?? require("../first-look/credit.js");
  const LARGEST = 20, COMPARISONS = 4000, SHOWN = 40;

  /** The 97.5% quantiles of Student's t with 1, 2, ... 19 degrees of freedom. */
  const QUANTILES = [12.706204736, 4.302652730, 3.182446305, 2.776445105, 2.570581836, 2.446911851, 2.364624252, 2.306004135, 2.262157163, 2.228138852,
    2.200985160, 2.178812830, 2.160368656, 2.144786688, 2.131449546, 2.119905299, 2.109815578, 2.100922040, 2.093024054];

  /** Half the width of a bar in standard errors. */
  const BARS = {
    t: ["95% interval", (n) => QUANTILES[n - 2]],
    sd: ["± standard deviation", (n) => Math.sqrt(n)],
    se: ["± standard error", () => 1],
  };

  /** The bar of the mean of n paired differences. */
  function interval(differences, bar) {
    const n = differences.length, value = differences.reduce((sum, d) => sum + d, 0) / n;
    const square = differences.reduce((sum, d) => sum + (d - value) ** 2, 0) / (n - 1);
    const reach = BARS[bar][1](n) * Math.sqrt(square / n);
    return { value, low: value - reach, high: value + reach };
  }

  /** Differences per seed [comparison][seed] without a true difference, with standard deviation 1. */
  function draws(seed) {
    const normal = credit.normals(seed);
    return Array.from({ length: COMPARISONS }, () => Array.from({ length: LARGEST }, normal));
  }

  /** The bars of all comparisons with n seeds and a true difference. */
  const intervals = (drawn, n, truth, bar) => drawn.map((own) => interval(own.slice(0, n).map((d) => d + truth), bar));

  /** Shares of the bars that cover the true difference, and that exclude 0. */
  const shares = (bars, truth) => ({
    covers: bars.filter(({ low, high }) => low <= truth && truth <= high).length / bars.length,
    found: bars.filter(({ low, high }) => low > 0 || high < 0).length / bars.length,
  });

  const api = { QUANTILES, draws, interval, intervals, shares };
  if (typeof module !== "undefined") { module.exports = api; return; }

  root.flowrlDraw.figure("chance", (place) => {
    const { button, chart, element, onWidth, radios, range, says } = root.flowrlDraw;
    const state = { bar: "t", n: 3, truth: 0, seed: 1 };
    let drawn = draws(state.seed), width = 0;
    const update = (changes) => { Object.assign(state, changes); draw(); };
    const kinds = radios("Bar around the mean difference", "fl-bar", Object.entries(BARS).map(([key, [name]]) => [key, name]), (bar) => update({ bar }));
    const seeds = range("Seeds", { min: 2, max: LARGEST, step: 1 }, (n) => update({ n }));
    const truth = range("True difference", { min: 0, max: 2, step: 0.1 }, (value) => update({ truth: value }));
    const note = says(), charts = element("div", { class: "fl-two" });
    const again = button("New seeds", () => { state.seed += 1; drawn = draws(state.seed); draw(); });
    place.append(kinds.set, element("div", { class: "fl-row" }, seeds.box, truth.box, again), note, charts);

    function many(bars, size) {
      const reach = 3.2, made = chart({ width: size, height: 300, x: [-reach, reach], y: [SHOWN, 0], title: `${SHOWN} comparisons with ${state.n} seeds each`, xTicks: [-2, 0, 2],
        xTitle: "difference, in standard deviations between seeds", margins: [24, 6, 36, 6] });
      made.line([[0, 0], [0, SHOWN]], "stroke: var(--fl-line)", 1);
      if (state.truth > 0) made.line([[state.truth, 0], [state.truth, SHOWN]], "stroke: var(--fl-ink)", 1.5, "4 3");
      const clip = (v) => Math.min(Math.max(v, -reach), reach);
      bars.slice(0, SHOWN).forEach(({ value, low, high }, k) => {
        const found = low > 0 || high < 0, colour = found ? (state.truth > 0 && low > 0 ? "var(--fl-up)" : "var(--fl-down)") : "var(--fl-zero)";
        made.line([[clip(low), k + 0.5], [clip(high), k + 0.5]], `stroke: ${colour}`, 3);
        made.dots([[clip(value), k + 0.5]], 4.5, "stroke: var(--fl-ink)");
      });
      return made.svg;
    }

    function power(size) {
      const made = chart({ width: size, height: 300, x: [2, LARGEST], y: [0, 1], title: state.truth > 0 ? "How often the difference is found" : "How often a difference is found",
        yTicks: [[0.05, "5%"], [0.5, "50%"], [0.8, "80%"], [1, "100%"]], xTicks: [2, 3, 5, 10, 15, 20], xTitle: "seeds", margins: [26, 10, 36, 44] });
      const curve = Array.from({ length: LARGEST - 1 }, (_, k) => [k + 2, shares(intervals(drawn, k + 2, state.truth, state.bar), state.truth).found]);
      const colour = `var(--fl-${state.truth > 0 ? "up" : "down"})`;
      made.line(curve, `stroke: ${colour}`, 2.5);
      made.dots([curve[state.n - 2]], 11, `stroke: ${colour}`);
      return made.svg;
    }

    function draw() {
      kinds.show(state.bar);
      seeds.show(state.n, String(state.n));
      truth.show(state.truth, state.truth.toFixed(1));
      const bars = intervals(drawn, state.n, state.truth, state.bar), { covers, found } = shares(bars, state.truth);
      const size = width >= 600 ? (width - 16) / 2 : width;
      charts.replaceChildren(many(bars, size), power(size));
      const all = COMPARISONS.toLocaleString("en"), what = state.truth > 0 ? "finds a difference (blue)" : "finds a difference that is not there (orange)";
      note.textContent = `Of ${all} simulated comparisons, the bar covers the true difference in ${(100 * covers).toFixed(1)}%, and excludes 0, so that one ${what}, in ${(100 * found).toFixed(1)}%.`;
    }

    onWidth(charts, (now) => { width = now; draw(); });
  });
})(typeof window === "undefined" ? globalThis : window);
