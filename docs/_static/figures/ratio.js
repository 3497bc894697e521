/* The ratio of a new and an old Gaussian policy whose means differ by delta standard deviations in every latent element, and its clip.
   Numbers: flowrl/flow/gaussian.py and flowrl/losses/terms.py; tests/docs/test_figures.py compares them. */
"use strict";

(function (root) {
  const credit = root.flowrlCredit ?? require("../first-look/credit.js");
  const PAIRS = 120;

  /** log pi - log pi_old of a draw whose noise has this mean over the elements: per element noise delta - delta^2 / 2. */
  const logRatio = (noise, elements, delta, kind) => (noise * delta - (delta * delta) / 2) * (kind === "sum" ? elements : 1);

  /** Mean and standard deviation of the log-ratio: the mean noise has standard deviation 1 / sqrt(elements). */
  function moments(elements, delta, kind) {
    const times = kind === "sum" ? elements : 1;
    return { mean: (-times * delta * delta) / 2, std: (times * delta) / Math.sqrt(elements) };
  }

  /** max(-A ratio, -A clip(ratio, 1 - c, 1 + c)). */
  const surrogate = (ratio, advantage, clip) =>
    Math.max(-advantage * ratio, -advantage * Math.min(Math.max(ratio, 1 - clip), 1 + clip));

  /** P(Z < z) of the standard normal distribution, to 1e-7 (Abramowitz and Stegun 26.2.17). */
  function normalCdf(z) {
    const t = 1 / (1 + 0.2316419 * Math.abs(z));
    const tail = Math.exp((-z * z) / 2) / Math.sqrt(2 * Math.PI)
      * t * (0.319381530 + t * (-0.356563782 + t * (1.781477937 + t * (-1.821255978 + t * 1.330274429))));
    return z > 0 ? 1 - tail : tail;
  }

  /** Share of draws beyond 1 + clip, and below 1 - clip. */
  function beyond(elements, delta, clip, kind) {
    const { mean, std } = moments(elements, delta, kind);
    return { above: 1 - normalCdf((Math.log1p(clip) - mean) / std), below: normalCdf((Math.log1p(-clip) - mean) / std) };
  }

  const api = { beyond, logRatio, moments, normalCdf, surrogate };
  if (typeof module !== "undefined") { module.exports = api; return; }

  root.flowrlDraw.figure("ratio", (place, start) => {
    const { HALO, chart, element, onWidth, radios, range, says } = root.flowrlDraw;
    const { elements: count = 4096, change = 10 ** -2.2, clip: range0 = 1e-4 } = start;
    const state = { kind: "mean", sign: 1, power: Math.round(Math.log2(count)), delta: Math.log10(change), clip: Math.log10(range0) };
    const normal = credit.normals(2), draws = Array.from({ length: PAIRS }, normal);
    let width = 0;
    const update = (changes) => { Object.assign(state, changes); draw(); };
    const kinds = radios("Log-ratio over the elements", "fl-kind", [["mean", "mean"], ["sum", "sum"]], (kind) => update({ kind }));
    const signs = radios("Advantage", "fl-sign", [[1, "+1"], [-1, "−1"]], (sign) => update({ sign: Number(sign) }));
    const elements = range("Elements", { min: 0, max: 18, step: 1 }, (power) => update({ power }));
    const delta = range("Change (std)", { min: -4, max: -1, step: 0.1 }, (value) => update({ delta: value }));
    const clip = range("Clip range", { min: -5, max: -0.7, step: 0.1 }, (value) => update({ clip: value }));
    const note = says(), charts = element("div", { class: "fl-two" });
    place.append(element("div", { class: "fl-row" }, kinds.set, signs.set), element("div", { class: "fl-sliders" }, elements.box, delta.box, clip.box), note, charts);

    const short = (value) => (value === 0 ? "0" : value >= 1e-3 ? String(Number(value.toPrecision(2))) : value.toExponential(0).replace("e-", "e−"));
    const percent = (share) => `${(100 * share).toFixed(share > 5e-4 && share < 0.095 ? 1 : 0)}%`;
    const shades = { mean: "var(--fl-up)", sum: "var(--fl-down)" };

    function sizes(now, size) {
      const made = chart({ width: size, height: 270, x: [0, 18], y: [-6, 3], title: "Typical |log ratio|", xTicks: [[0, "1"], [4, "16"], [8, "256"], [12, "4,096"], [16, "65,536"]],
        yTicks: [[-6, "1e−6"], [-4, "1e−4"], [-2, "0.01"], [0, "1"], [2, "100"]], xTitle: "elements of the latent", margins: [26, 14, 36, 40] });
      const inside = (value) => Math.min(Math.max(Math.log10(value), -6), 3);
      made.line([[0, state.clip], [18, state.clip]], "stroke: var(--fl-ink)", 1.5, "5 4");
      made.text(0.3, state.clip, `clip range ${short(now.clip)}`, { dy: -5, class: "fl-soft", style: HALO });
      for (const kind of ["mean", "sum"]) {
        const typical = (power) => { const { mean, std } = moments(2 ** power, now.delta, kind); return inside(Math.hypot(mean, std)); };
        made.line(Array.from({ length: 37 }, (_, k) => [k / 2, typical(k / 2)]), `stroke: ${shades[kind]}; opacity: ${kind === state.kind ? 1 : 0.5}`, 2.5);
        if (kind === state.kind) made.dots([[state.power, typical(state.power)]], 11, `stroke: ${shades[kind]}`);
        made.text(17.7, typical(17.5), kind, { "text-anchor": "end", dy: -9, "font-weight": 600, style: `fill: ${shades[kind]}; ${HALO}` });
      }
      return made.svg;
    }

    function losses(now, size) {
      const reach = 3.4, made = chart({ width: size, height: 270, x: [-reach, reach], y: [-reach, reach], title: `Loss of ${PAIRS} draws, A = ${state.sign > 0 ? "+1" : "−1"}`,
        xTicks: [[-1, "1 − c"], [0, "1"], [1, "1 + c"]], xTitle: "ratio (beyond 3 c: at the edge)", margins: [26, 8, 36, 8] });
      made.rect(-1, 1, -reach, reach, "fill: var(--fl-mode)");
      const own = (ratio) => (surrogate(ratio, state.sign, now.clip) + state.sign) / now.clip, edge = (v) => Math.min(Math.max(v, -3.2), 3.2);
      made.line([-3.2, -1, 0, 1, 3.2].map((u) => [u, own(1 + u * now.clip)]), "stroke: var(--fl-line)", 2);
      const points = draws.map((z) => {
        const ratio = Math.exp(logRatio(z / Math.sqrt(now.elements), now.elements, now.delta, state.kind)), u = edge((ratio - 1) / now.clip);
        return { at: [u, own(1 + u * now.clip)], flat: state.sign * (ratio - 1) > now.clip };
      });
      for (const flat of [false, true]) {
        made.dots(points.filter((point) => point.flat === flat).map(({ at }) => at), 7, `stroke: var(--fl-${flat ? "down" : "up"}); opacity: 0.55`);
      }
      const { above, below } = beyond(now.elements, now.delta, now.clip, state.kind);
      [[-2.2, below], [0, 1 - above - below], [2.2, above]].forEach(([u, share]) => made.text(u, -3.1, percent(share), { "text-anchor": "middle", "font-weight": 600 }));
      return made.svg;
    }

    function draw() {
      const now = { elements: 2 ** state.power, delta: 10 ** state.delta, clip: 10 ** state.clip };
      kinds.show(state.kind);
      signs.show(state.sign);
      elements.show(state.power, now.elements.toLocaleString("en"));
      delta.show(state.delta, short(now.delta));
      clip.show(state.clip, short(now.clip));
      const size = width >= 600 ? (width - 16) / 2 : width;
      charts.replaceChildren(sizes(now, size), losses(now, size));
      const { above, below } = beyond(now.elements, now.delta, now.clip, state.kind), none = state.sign > 0 ? above : below;
      note.textContent = above + below < 5e-4 ? "All draws are within the band 1 ± c, and all have a gradient." : `${percent(above)} of the draws are above the band 1 ± c, and ${percent(below)} below it. `
        + `With A = ${state.sign > 0 ? "+1" : "−1"}, the ${percent(none)} ${state.sign > 0 ? "above" : "below"} it have no gradient (orange).`;
    }

    onWidth(charts, (now) => { width = now; draw(); });
  });
})(typeof window === "undefined" ? globalThis : window);
