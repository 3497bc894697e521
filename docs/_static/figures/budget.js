/* The network evaluations of one iteration of three methods, by their parts.
   Numbers: flowrl/run/plan.py, as `flowrl train --plan` prints them; tests/docs/test_figures.py compares them. */
"use strict";

(function (root) {
  const GROUPS = 8, METHODS = { "flow-grpo": "Flow-GRPO", "stepwise-flow-grpo": "Stepwise-Flow-GRPO", "tp-grpo": "TP-GRPO" };
  const PARTS = [["sampling", "rollout"], ["probes", "estimates"], ["update", "update"]];

  /** Evaluations of an iteration: `first` and `count` are the random, trained steps; `substeps` those of an estimate of Stepwise-Flow-GRPO. */
  function evaluations(method, { groups, members, steps, first, count, substeps, reference }) {
    const all = groups * members, shared = method === "stepwise-flow-grpo";
    // members that share the initial noise are one latent until the first random step
    const latents = (node) => (shared && node <= first ? groups : all);
    const nodes = Array.from({ length: steps }, (_, node) => node), random = nodes.slice(first, first + count);
    const sum = (chosen, value) => chosen.reduce((total, node) => total + value(node), 0);
    const own = { "flow-grpo": () => 0, "stepwise-flow-grpo": () => substeps - 1, "tp-grpo": (node) => steps - node - 1 }[method];  // the rollout has the first velocity
    const images = all + (method === "flow-grpo" ? 0 : sum(random, latents));
    return { sampling: sum(nodes, latents), probes: sum(random, (node) => own(node) * latents(node)), update: all * count * (reference ? 2 : 1), gradients: all * count, images };
  }

  /** The same in forward passes: a backward pass costs two. */
  const forwards = (counts) => ({ ...counts, update: counts.update + 2 * counts.gradients });

  const total = (counts) => counts.sampling + counts.probes + counts.update;

  const api = { evaluations, forwards, total };
  if (typeof module !== "undefined") { module.exports = api; return; }

  root.flowrlDraw.figure("budget", (place, start) => {
    const { HALO, chart, element, onWidth, radios, range, says } = root.flowrlDraw;
    const state = { groups: GROUPS, members: 12, steps: 10, first: 0, count: 9, wanted: Infinity, substeps: 5, reference: false, unit: "forwards", ...start };
    const shades = { sampling: "var(--fl-line)", probes: "var(--fl-amber)", update: "var(--fl-other)" };
    let width = 0;
    const update = (changes) => { Object.assign(state, changes); draw(); };
    const slider = (label, key, min, max) => range(label, { min, max, step: 1 }, (value) => update({ [key]: value }));
    const units = radios("Unit", "fl-unit", [["forwards", "forward passes"], ["evaluations", "network evaluations"]], (unit) => update({ unit }));
    const anchors = radios("KL to the base model", "fl-kl", [["", "without"], ["yes", "with"]], (value) => update({ reference: value === "yes" }));
    const sliders = { members: slider("Members of a group", "members", 2, 32), steps: slider("Sampling steps", "steps", 5, 40), first: slider("First random step", "first", 0, 38),
      count: range("Random steps", { min: 1, max: 39, step: 1 }, (value) => update({ wanted: value < state.steps - 1 - state.first ? value : Infinity })), substeps: slider("Substeps", "substeps", 1, 8) };
    const note = says(), box = element("div", { class: "fl-one" });
    place.append(element("div", { class: "fl-row" }, units.set, anchors.set), element("div", { class: "fl-sliders" }, ...Object.values(sliders).map((each) => each.box)), note, box);

    function bars(size, costs) {
      const narrow = size < 560, largest = Math.max(...costs.map(({ shown }) => total(shown))), nice = 10 ** Math.floor(Math.log10(largest));
      const unit = [0.2, 0.5, 1, 2, 5].map((k) => k * nice).find((k) => largest / k <= (narrow ? 4 : 6));
      const ticks = Array.from({ length: Math.floor(largest / unit) + 1 }, (_, k) => k * unit);
      const made = chart({ width: size, height: 232, x: [0, largest * 1.04], y: [3, 0], xTicks: ticks.map((v) => [v, v.toLocaleString("en")]), margins: [26, 8, 40, 6],
        xTitle: `${state.unit === "forwards" ? "forward passes" : "network evaluations"} of an iteration with ${GROUPS} groups`,
        label: costs.map(({ name, shown }) => `${name} ${total(shown)}`).join(", ") });
      for (const v of ticks) made.line([[v, 0], [v, 3]], "stroke: var(--fl-grid)", 1);
      let left = 6;
      for (const [part, name] of PARTS) {
        made.add(element("rect", { x: left, y: 5, width: 12, height: 12, rx: 2, style: `fill: ${shades[part]}` }));
        made.add(element("text", { x: left + 17, y: 15 }, name));
        left += 36 + 7.5 * name.length;
      }
      costs.forEach(({ name, shown, counts }, row) => {
        let begin = 0;
        made.text(0, row + 0.3, `${name}: ${Math.round(total(shown)).toLocaleString("en")}${narrow ? "" : `; ${counts.images.toLocaleString("en")} images scored`}`, { "font-weight": 600,
          style: HALO });
        for (const [part] of PARTS) {
          made.rect(begin, begin + shown[part], row + 0.4, row + 0.88, `fill: ${shades[part]}; stroke: var(--fl-back)`);
          begin += shown[part];
        }
      });
      return made.svg;
    }

    function draw() {
      state.first = Math.min(state.first, state.steps - 2);
      const most = state.steps - 1 - state.first;  // the last step is one of the ODE
      state.count = Math.min(state.wanted, most);
      sliders.first.limit(state.steps - 2);
      sliders.count.limit(most);
      units.show(state.unit);
      anchors.show(state.reference ? "yes" : "");
      for (const [key, each] of Object.entries(sliders)) each.show(state[key], String(state[key]));
      const costs = Object.entries(METHODS).map(([method, name]) => {
        const counts = evaluations(method, state);
        return { name, counts, shown: state.unit === "forwards" ? forwards(counts) : counts };
      });
      box.replaceChildren(bars(width, costs));
      const afford = costs.slice(1).map(({ shown }) => ((GROUPS * total(costs[0].shown)) / total(shown)).toFixed(1));
      note.textContent = `For the cost of ${GROUPS} groups with Flow-GRPO you get ${afford[0]} groups with Stepwise-Flow-GRPO, or ${afford[1]} with TP-GRPO. `
        + `Trained: steps ${state.first} to ${state.first + state.count - 1} of 0 to ${state.steps - 1}.`;
    }

    onWidth(box, (now) => { width = now; draw(); });
  });
})(typeof window === "undefined" ? globalThis : window);
