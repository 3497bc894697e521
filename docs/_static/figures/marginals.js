/* Marginals of a 1-D mixture under Flow-SDE, with and without the score correction.
   Numbers: flowrl/flow/mixture.py and flowrl/samplers/kernels.py; tests/docs/test_figures.py compares them. */
"use strict";

(function (root) {
  const credit = root.flowrlCredit ?? require("../first-look/credit.js");
  const MODES = [{ mean: -2, weight: 0.3 }, { mean: 0, weight: 0.5 }, { mean: 2, weight: 0.2 }], STD = 0.25;
  const STEPS = 100, FIRST = 0.98, POINTS = 2000, REACH = 4, BINS = 40;

  /** From 0.98, because the noise of the SDE is infinite at t = 1, to 0. */
  const TIMES = Array.from({ length: STEPS + 1 }, (_, i) => FIRST * (1 - i / STEPS));

  const variance = (t) => ((1 - t) * STD) ** 2 + t * t;

  /** v(x, t) = E[noise - data | x_t = x]. */
  function velocity(x, t) {
    const c = variance(t), factor = (t - (1 - t) * STD * STD) / c;
    let total = 0, v = 0;
    for (const { mean, weight } of MODES) {
      const gap = x - (1 - t) * mean, w = weight * Math.exp(-(gap * gap) / (2 * c));
      total += w;
      v += w * (factor * gap - mean);
    }
    return total > 0 ? v / total : x / t;  // far from all modes
  }

  /** The exact density of x_t. */
  function density(x, t) {
    const c = variance(t);
    return MODES.reduce((sum, { mean, weight }) =>
      sum + weight * Math.exp(-((x - (1 - t) * mean) ** 2) / (2 * c)) / Math.sqrt(2 * Math.PI * c), 0);
  }

  /** Mean and standard deviation of a step; without the correction the mean is that of the ODE. */
  function step(x, t, s, noiseLevel, corrected) {
    const v = velocity(x, t), { keep, drift, std } = credit.sdeFactors(t, s, noiseLevel);
    return { mean: corrected ? keep * x - drift * v : x - (t - s) * v, std };
  }

  /** Exact draws at the first time, and the noise of their steps [point][step]. */
  function draws(seed, points) {
    const normal = credit.normals(seed);
    return Array.from({ length: points }, (_, k) => {
      const share = (k + 0.5) / points;
      const { mean } = MODES[share < MODES[0].weight ? 0 : share < MODES[0].weight + MODES[1].weight ? 1 : 2];
      const start = (1 - FIRST) * (mean + STD * normal()) + FIRST * normal();
      return { start, noise: Array.from({ length: STEPS }, normal) };
    });
  }

  /** Paths [point][time]. */
  function follow(drawn, noiseLevel, corrected) {
    return drawn.map(({ start, noise }) => {
      const path = [start];
      for (let i = 0; i < STEPS; i++) {
        const { mean, std } = step(path[i], TIMES[i], TIMES[i + 1], noiseLevel, corrected);
        path.push(mean + std * noise[i]);
      }
      return path;
    });
  }

  /** The histogram of values over [-REACH, REACH], as a density. */
  function histogram(values) {
    const counts = new Array(BINS).fill(0), size = (2 * REACH) / BINS;
    for (const x of values) counts[Math.min(Math.max(Math.floor((x + REACH) / size), 0), BINS - 1)] += 1;
    return counts.map((count) => count / (values.length * size));
  }

  /** Share of the points that would have to move for the histogram to be exact. */
  function misplaced(bars, t) {
    const size = (2 * REACH) / BINS, fine = 10;
    return bars.reduce((sum, bar, k) => {
      let exact = 0;
      for (let j = 0; j < fine; j++) exact += density(-REACH + (k + (j + 0.5) / fine) * size, t) / fine;
      return sum + Math.abs(bar - exact) * size / 2;
    }, 0);
  }

  const api = { MODES, STD, TIMES, density, draws, follow, histogram, misplaced, step, velocity };
  if (typeof module !== "undefined") { module.exports = api; return; }

  root.flowrlDraw.figure("marginals", (place) => {
    const { chart, element, onWidth, range, says } = root.flowrlDraw;
    const drawn = draws(1, POINTS), state = { level: 0.7, index: STEPS };
    let runs, width = 0;
    const level = range("Noise level a", { min: 0, max: 1, step: 0.05 }, (value) => { state.level = value; compute(); });
    const time = range("Time t", { min: 0, max: STEPS, step: 1 }, (value) => { state.index = value; draw(); });
    const note = says(), charts = element("div", { class: "fl-two" });
    place.append(element("div", { class: "fl-row" }, level.box, time.box), note, charts);

    function compute() {
      runs = [true, false].map((corrected) => follow(drawn, state.level, corrected));
      if (width) draw();
    }

    function panel(paths, title, colour, size) {
      const made = chart({ width: size, height: 230, x: [0, 1.42], y: [-REACH, REACH], title, yTicks: [-2, 0, 2], margins: [24, 4, 34, 26],
        xTicks: [[0.02, "t = 1"], [0.5, "0.5"], [1, "0"]], xTitle: "noise → data; histogram at the line" });
      const t = TIMES[state.index], at = 1 - t, high = 0.38 / density(0, 0), size1 = (2 * REACH) / BINS;
      for (const path of paths.filter((_, k) => k % 100 === 0)) {
        made.line(path.map((x, i) => [1 - TIMES[i], x]), `stroke: ${colour}; opacity: 0.45`, 1);
      }
      made.line([[at, -REACH], [at, REACH]], "stroke: var(--fl-ink)", 1.5, "4 3");
      const bars = histogram(paths.map((path) => path[state.index])), base = 1.03;
      bars.forEach((bar, k) => made.rect(base, base + bar * high, -REACH + k * size1, -REACH + (k + 1) * size1 - 0.03, `fill: ${colour}; opacity: 0.55`));
      made.line(Array.from({ length: 161 }, (_, k) => -REACH + k / 20).map((x) => [base + density(x, t) * high, x]), "stroke: var(--fl-ink)", 1.8);
      return { svg: made.svg, wrong: misplaced(bars, t) };
    }

    function draw() {
      level.show(state.level, state.level.toFixed(2));
      time.show(state.index, TIMES[state.index].toFixed(2));
      const size = width >= 600 ? (width - 16) / 2 : width;
      const panels = [panel(runs[0], "SDE with the score correction", "var(--fl-up)", size), panel(runs[1], "SDE without the correction", "var(--fl-down)", size)];
      charts.replaceChildren(...panels.map(({ svg }) => svg));
      const [right, wrong] = panels.map((each) => `${Math.round(100 * each.wrong)}%`);
      note.textContent = `${state.level === 0 ? "At a = 0 both are the ODE. " : ""}The line is the exact density at t = ${TIMES[state.index].toFixed(2)}. `
        + `Misplaced points: ${right} with the correction, ${wrong} without. Chance alone misplaces about 4% of ${POINTS.toLocaleString("en")} points.`;
    }

    compute();
    onWidth(charts, (now) => { width = now; draw(); });
  });
})(typeof window === "undefined" ? globalThis : window);
