/* Draws the page "First look" with the numbers of credit.js: credit along a path, and the bent value curve. */
"use strict";

(function () {
  const credit = window.flowrlCredit;
  const { colour, element, legend, onWidth, radios, range, signed, tint } = window.flowrlDraw;
  const { degrees: DEGREES, members: MEMBERS } = credit.FIRST, STEP_MS = 420;
  const RULES = {
    "flow-grpo": ["Flow-GRPO", "Every step of a path gets the same credit: its final reward, compared with the group's."],
    gains: ["Stepwise-Flow-GRPO: gains", "A step gets its gain: the change of the final reward that we estimate by continuing the path without noise."],
    lambda: ["λ-weighted gains", "A step gets its gain, plus later gains with the weights λ, λ², λ³ and so on."],
    tp: ["TP-GRPO: turning points", "A step gets its gain. At a turning point (ringed), the path turns towards its final trend: that step gets the whole change to the end."],
    exact: ["Exact values", "A step gets the gain of the exact value: the mean final reward over all random continuations, computed on a grid with an error below 0.01. This takes a plane; images have too many dimensions."],
  };

  // Credit along a path

  function pathsFigure(root) {
    const goal = credit.target(DEGREES), still = matchMedia("(prefers-reduced-motion: reduce)").matches;
    const state = { rule: "flow-grpo", member: credit.FIRST.member, seed: credit.FIRST.seed, lambda: credit.FIRST.lambda, shown: still ? credit.STEPS : 0, playing: !still };
    let group, tables, values, advantages, selected, parts = [], width = 0, last;

    const rules = radios("Credit rule", "fl-rule", Object.entries(RULES).map(([key, [name]]) => [key, name]), (rule) => update({ rule }));
    const members = radios("Member", "fl-member", Array.from({ length: MEMBERS }, (_, m) => [m, m + 1]),
      (member) => update({ member: Number(member) }), true);
    const lambda = range("λ", { min: 0, max: 1, step: 0.05 }, (value) => update({ lambda: value }));
    const steps = range("Steps", { min: 0, max: credit.STEPS, step: 1 }, (shown) => { state.playing = false; reveal(shown); });
    const play = element("button", { type: "button", onclick: () => {
      state.playing = !state.playing;
      reveal(state.shown >= credit.STEPS ? 0 : state.shown);
      tick();
    } });
    const renew = element("button", { type: "button", onclick: () => {
      Object.assign(state, still ? {} : { playing: true, shown: 0 });
      update({ seed: state.seed + 1 });
      tick();
    } }, "New noise");
    const first = element("button", { type: "button", onclick: () => update({ seed: credit.FIRST.seed }) }, "First noise");
    const says = element("p", { class: "fl-says", "aria-live": "polite" });
    const plane = element("div", { class: "fl-plane" }), curve = element("div", { class: "fl-wide" });
    root.append(element("div", { class: "fl-parts" }, plane,
      element("div", {}, rules.set, lambda.box, says, members.set, element("div", { class: "fl-row" }, play, renew, first, steps.box), legend()),
      curve));

    /** Reads rule, member, seed and lambda from the address, as in #rule=tp&member=2. */
    function fromAddress() {
      const read = new URLSearchParams(location.hash.slice(1)), number = (name) => (read.has(name) ? Number(read.get(name)) : NaN);
      if (read.get("rule") in RULES) state.rule = read.get("rule");
      if (number("member") >= 1 && number("member") <= MEMBERS) state.member = Math.round(number("member")) - 1;
      if (number("seed") >= 0) state.seed = Math.round(number("seed"));
      if (number("lambda") >= 0 && number("lambda") <= 1) state.lambda = number("lambda");
    }

    function toAddress() {
      const { rule, member, seed } = state;
      const hash = new URLSearchParams({ rule, member: member + 1, seed, ...(rule === "lambda" && { lambda: state.lambda }) });
      try { history.replaceState(null, "", `#${hash}`); } catch { /* some browsers refuse this for files */ }
    }

    function update(changes) {
      Object.assign(state, changes);
      toAddress();
      compute();
    }

    function compute() {
      if (!group || group.seed !== state.seed) group = { seed: state.seed, paths: credit.group(state.seed, MEMBERS) };
      const exact = state.rule === "exact";
      if (exact) tables ??= credit.exactTables(goal);
      values = exact ? credit.exactValues(group.paths, goal, tables) : credit.completedValues(group.paths, goal);
      advantages = credit.advantages(state.rule, values, state);
      selected = state.rule === "tp" ? credit.selectedTurns(values) : [];
      rules.show(state.rule);
      members.show(state.member);
      first.hidden = state.seed === credit.FIRST.seed;
      lambda.box.hidden = state.rule !== "lambda";
      lambda.show(state.lambda, state.lambda.toFixed(2));
      says.textContent = RULES[state.rule][1];
      if (width) draw();
    }

    /** A polyline whose pieces appear step by step. */
    function polyline(points, member, chosen) {
      const pieces = points.slice(1).map((to, k) => {
        const drawn = k < credit.DECISIONS, from = points[k];
        const line = element("line", {
          x1: from[0], y1: from[1], x2: to[0], y2: to[1], "stroke-linecap": "round", class: drawn ? "fl-step" : "fl-last",
          style: `stroke: ${drawn ? colour(advantages[member][k]) : "var(--fl-zero)"}`,
          "stroke-width": chosen ? 4.5 : 1.8, opacity: chosen ? 1 : 0.55, "stroke-dasharray": drawn ? false : "2 6",
        });
        parts.push({ line, from, to, step: k });
        return line;
      });
      return element("g", { "data-member": member + 1 }, ...pieces);
    }

    const order = () => [...group.paths.keys()].sort((a, b) => (a === state.member) - (b === state.member));

    function drawPlane(size) {
      const reach = Math.max(2.8, ...group.paths.flat(2).map(Math.abs)) + 0.15;
      const at = ([x, y]) => [((x + reach) / (2 * reach)) * size, ((reach - y) / (2 * reach)) * size];
      const unit = size / (2 * reach), star = at(goal);
      const svg = element("svg", { viewBox: `0 0 ${size} ${size}`, role: "img", "aria-label":
        `Eight paths in the plane. Member ${state.member + 1} ends with reward ${values[state.member].at(-1).toFixed(2)}.` });
      for (const mean of credit.MEANS) {
        const [cx, cy] = at(mean);
        svg.append(element("circle", { cx, cy, r: 2 * credit.STD * unit, style: "fill: var(--fl-mode)" }));
      }
      for (const member of order()) {
        const points = group.paths[member].map(at), chosen = member === state.member;
        svg.append(polyline(points, member, chosen));
        const head = element("circle", { r: chosen ? 6 : 3.5, style: "fill: var(--fl-ink); stroke: var(--fl-back)", "stroke-width": 1.5 });
        parts.push({ head, points });
        const reachable = element("path", { d: `M${points.map((p) => p.join(" ")).join("L")}`, fill: "none", stroke: "transparent",
          "stroke-width": 14, style: "cursor: pointer", onclick: () => update({ member }) });
        svg.append(head, reachable);
        if (chosen) drawTurns(svg, points, member);
      }
      const [x, y] = at(group.paths[0][0]);
      svg.append(element("path", { d: starAt(star, 11), style: "fill: var(--fl-star); stroke: var(--fl-back)", "stroke-width": 1.5 }),
        element("circle", { cx: x, cy: y, r: 4, style: "fill: var(--fl-back); stroke: var(--fl-ink)", "stroke-width": 2 }),
        element("text", { x: x + 9, y: y + 4, style: "paint-order: stroke; stroke: var(--fl-back); stroke-width: 3px" }, "start"));
      plane.replaceChildren(svg);
    }

    function starAt([x, y], radius) {
      const corner = (k) => {
        const angle = (k * Math.PI) / 5 - Math.PI / 2, r = k % 2 ? radius * 0.45 : radius;
        return `${x + r * Math.cos(angle)} ${y + r * Math.sin(angle)}`;
      };
      return `M${Array.from({ length: 10 }, (_, k) => corner(k)).join("L")}Z`;
    }

    /** Rings at the states in which turning points are decided. */
    function drawTurns(svg, points, member) {
      (selected[member] ?? []).forEach((turns, k) => {
        if (!turns) return;
        const ring = element("circle", { cx: points[k][0], cy: points[k][1], r: 9, fill: "none", class: "fl-turn",
          style: "stroke: var(--fl-ink)", "stroke-width": 2 });
        parts.push({ ring, step: k });
        svg.append(ring);
      });
    }

    function drawCurve(size) {
      const left = 34, right = 12, top = 20, bottom = 150, narrow = size < 560, columns = credit.DECISIONS;
      const x = (k) => left + (k / columns) * (size - left - right), y = (v) => bottom - v * (bottom - top);
      const numbers = advantages[state.member].map((a) => signed(a, narrow ? 1 : 2));
      const svg = element("svg", { viewBox: `0 0 ${size} 236`, role: "img", "aria-label":
        `${RULES[state.rule][0]}, member ${state.member + 1}. Advantages of steps 0 to ${columns - 1}: ${numbers.join(", ")}.` });
      const quantity = state.rule === "exact" ? "Expected" : "Estimated";
      svg.append(element("text", { x: left, y: 12 }, `${quantity} final reward before each step${narrow ? "" : "; at the right end: the final reward"}`));
      for (const v of [0, 0.5, 1]) {
        svg.append(element("line", { x1: left, x2: size - right, y1: y(v), y2: y(v), style: "stroke: var(--fl-grid)" }),
          element("text", { x: left - 6, y: y(v) + 4, "text-anchor": "end", class: "fl-soft" }, v.toFixed(1)));
      }
      for (const member of order()) {
        const points = values[member].map((v, k) => [x(k), y(v)]);
        svg.append(polyline(points, member, member === state.member));
        if (member === state.member) drawTurns(svg, points, member);
      }
      svg.append(element("text", { x: left, y: 176 }, `Advantage of each step, member ${state.member + 1}`));
      numbers.forEach((text, k) => {
        const cell = element("g", { class: "fl-cell" },
          element("rect", { x: x(k) + 1, y: 184, width: x(k + 1) - x(k) - 2, height: 26, rx: 3, style: `fill: ${tint(advantages[state.member][k])}` }),
          element("text", { x: (x(k) + x(k + 1)) / 2, y: 201, "text-anchor": "middle" }, text));
        svg.append(cell, element("text", { x: (x(k) + x(k + 1)) / 2, y: 226, "text-anchor": "middle", class: "fl-soft" }, String(k)));
        parts.push({ ring: cell, step: k + 1 });
      });
      svg.append(element("text", { x: left - 4, y: 226, "text-anchor": "end", class: "fl-soft" }, "step"));
      curve.replaceChildren(svg);
    }

    function draw() {
      parts = [];
      drawPlane(Math.round(plane.clientWidth));
      drawCurve(width);
      reveal(state.shown);
    }

    /** Shows the first `shown` steps; a fraction is part of a step. */
    function reveal(shown) {
      state.shown = shown;
      for (const part of parts) {
        if (part.ring) part.ring.setAttribute("visibility", part.step <= shown ? "visible" : "hidden");
        if (part.line) {
          const share = Math.min(Math.max(shown - part.step, 0), 1);
          part.line.setAttribute("visibility", share > 0 ? "visible" : "hidden");
          part.line.setAttribute("x2", part.from[0] + share * (part.to[0] - part.from[0]));
          part.line.setAttribute("y2", part.from[1] + share * (part.to[1] - part.from[1]));
        }
        if (part.head) {
          const k = Math.min(Math.floor(shown), credit.STEPS - 1), share = shown - k;
          for (const axis of [0, 1]) part.head.setAttribute(["cx", "cy"][axis], part.points[k][axis] + share * (part.points[k + 1][axis] - part.points[k][axis]));
        }
      }
      steps.show(Math.floor(shown), `${Math.floor(shown)} of ${credit.STEPS}`);
      play.textContent = state.playing ? "Pause" : "Play";
    }

    function tick(now) {
      if (!state.playing) { last = undefined; return; }
      const shown = Math.min(state.shown + (last && now ? Math.min(now - last, 100) / STEP_MS : 0), credit.STEPS);
      last = now;
      state.playing = shown < credit.STEPS;
      reveal(shown);
      cancelAnimationFrame(tick.frame);
      if (state.playing) tick.frame = requestAnimationFrame(tick);
      else last = undefined;
    }

    addEventListener("hashchange", () => { fromAddress(); compute(); });
    fromAddress();
    compute();
    onWidth(curve, (now) => { width = now; draw(); });
    tick();
  }

  // The bent value curve

  function curveFigure(root) {
    const NAMES = ["a", "b", "c"], DASHES = ["", "7 4", "2 4"];
    const EXAMPLE = [[0.5, 0.4, 0.3, 0.45, 0.6], [0.5, 0.6, 0.7, 0.55, 0.4], [0.5, 0.55, 0.52, 0.65, 0.62]];
    const copy = () => EXAMPLE.map((row) => [...row]);
    const state = { rule: "tp", lambda: credit.FIRST.lambda, consistent: true, balance: "aggregate", values: copy(), active: [0, 4] };
    const columns = EXAMPLE[0].length, TOP = 12, BOTTOM = 230, HEIGHT = 266;
    let width = 0;

    const shown = Object.entries(RULES).filter(([key]) => key !== "exact");
    const rules = radios("Credit rule", "fl-bent-rule", shown.map(([key, [name]]) => [key, name]), (rule) => update({ rule }));
    const lambda = range("λ", { min: 0, max: 1, step: 0.05 }, (value) => update({ lambda: value }));
    const select = (label, options, change) => element("label", { class: "fl-row" }, label,
      element("select", { onchange: (event) => change(event.target.value) }, ...options.map(([value, text]) => element("option", { value }, text))));
    const turning = element("div", { class: "fl-row" },
      select("Turning points", [["yes", "consistent"], ["", "plain"]], (value) => update({ consistent: value === "yes" })),
      select("Balancing", [["aggregate", "by the change to the end (paper)"], ["trend", "by the trend (public code)"], ["none", "none"]],
        (balance) => update({ balance })));
    const svg = element("svg", { role: "group", "aria-label": "Value curves of three members", onpointerdown: drag });
    // a finger on a point moves the point, not the page
    svg.addEventListener("touchstart", (event) => event.target.closest(".fl-point") && event.preventDefault(), { passive: false });
    const chart = element("div", {}, svg), table = element("div"), note = element("p", { class: "fl-says" });
    const reset = element("button", { type: "button", onclick: () => update({ values: copy() }) }, "Reset the curves");
    root.append(rules.set, lambda.box, turning, chart, note, table, element("div", { class: "fl-row" }, reset, legend()));

    function update(changes) {
      Object.assign(state, changes);
      rules.show(state.rule);
      lambda.box.hidden = state.rule !== "lambda";
      lambda.show(state.lambda, state.lambda.toFixed(2));
      turning.hidden = state.rule !== "tp";
      if (width) draw();
    }

    function move(member, column, value) {
      state.values[member][column] = Math.round(Math.min(Math.max(value, 0), 1) * 100) / 100;
      state.active = [member, column];
      draw();
    }

    function key(event, member, column) {
      const change = { ArrowUp: 0.05, ArrowDown: -0.05, PageUp: 0.2, PageDown: -0.2 }[event.key];
      const aside = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (change) move(member, column, state.values[member][column] + change);
      else if (event.key === "Home" || event.key === "End") move(member, column, event.key === "Home" ? 0 : 1);
      else if (aside) state.active = [member, Math.min(Math.max(column + aside, 0), columns - 1)];
      else return;
      event.preventDefault();
      event.stopPropagation();  // on the site, left and right would open the neighbouring page
      draw();
    }

    function draw() {
      const { values } = state, focused = svg.contains(document.activeElement);
      const tp = state.rule === "tp", selected = tp ? credit.selectedTurns(values, state) : [];
      const marks = tp && { plain: credit.turningPoints(values, false), consistent: credit.turningPoints(values, true) };
      const mark = (member, k) => (!tp ? "" : selected[member][k] ? "●" : marks.consistent[member][k] ? "○" : marks.plain[member][k] ? "◌" : "");
      const advantages = credit.advantages(state.rule, values, state);
      drawChart(advantages, mark);
      drawTable(advantages, mark, selected);
      if (focused) svg.querySelector(`[data-point="${state.active}"]`).focus({ preventScroll: true });
      note.textContent = tp
        ? "● turning point that gets its long-term reward, the change to the end; ○ consistent turning point that balancing leaves out; ◌ turning point of the plain rule only. Underlined numbers enter the advantages."
        : `${RULES[state.rule][1]} ${state.rule === "flow-grpo" ? "" : "Underlined numbers enter the advantages."}`;
    }

    function drawChart(advantages, mark) {
      const left = 44, right = 34;
      const x = (k) => left + (k / (columns - 1)) * (width - left - right), y = (v) => BOTTOM - v * (BOTTOM - TOP);
      svg.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
      svg.replaceChildren();
      for (const v of [0, 0.5, 1]) {
        svg.append(element("line", { x1: left, x2: width - right, y1: y(v), y2: y(v), style: "stroke: var(--fl-grid)" }),
          element("text", { x: left - 18, y: y(v) + 4, "text-anchor": "end", class: "fl-soft" }, v.toFixed(1)));
      }
      for (let k = 0; k < columns - 1; k++) {
        svg.append(element("text", { x: (x(k) + x(k + 1)) / 2, y: 252, "text-anchor": "middle", class: "fl-soft" }, `step ${k}`));
      }
      const members = [0, 1, 2].sort((a, b) => (a === state.active[0]) - (b === state.active[0]));
      const heights = spread(state.values.map((row) => y(row[columns - 1])));
      for (const member of members) {
        const row = state.values[member];
        row.slice(1).forEach((value, k) => svg.append(element("line", {
          x1: x(k), y1: y(row[k]), x2: x(k + 1), y2: y(value), "stroke-width": 4, "stroke-dasharray": DASHES[member] || false, class: "fl-step",
          style: `stroke: ${colour(advantages[member][k])}`,
        })));
        svg.append(element("text", { x: x(columns - 1) + 14, y: heights[member] + 4, "font-weight": 700 }, NAMES[member]));
      }
      for (const member of members) {
        state.values[member].forEach((value, column) => svg.append(point(member, column, x(column), y(value), mark(member, column))));
      }
    }

    /** Heights of labels, at least 14 pixels apart. */
    function spread(heights) {
      const order = [0, 1, 2].sort((a, b) => heights[a] - heights[b]), result = [...heights];
      order.forEach((member, place) => {
        if (place > 0) result[member] = Math.max(result[member], result[order[place - 1]] + 14);
      });
      return result;
    }

    function point(member, column, cx, cy, mark) {
      const value = state.values[member][column], active = String([member, column]) === String(state.active);
      const firstOfMember = member !== state.active[0] && column === 0;
      const final = column === columns - 1 ? "final reward" : `value before step ${column}`;
      const ring = mark && element("circle", { cx, cy, r: 11, fill: mark === "●" ? "var(--fl-mode)" : "none", style: "stroke: var(--fl-ink)", "stroke-width": 2,
        "stroke-dasharray": mark === "◌" ? "3 3" : false, class: "fl-turn" });
      return element("g", {
        class: "fl-point", "data-point": [member, column], role: "slider", tabindex: active || firstOfMember ? 0 : -1,
        "aria-label": `Member ${NAMES[member]}, ${final}`, "aria-orientation": "vertical",
        "aria-valuemin": 0, "aria-valuemax": 1, "aria-valuenow": value,
        onkeydown: (event) => key(event, member, column),
      },
      element("circle", { cx, cy, r: 20, fill: "transparent" }),
      element("circle", { cx, cy, r: 15, fill: "none", stroke: "transparent", "stroke-width": 3, class: "fl-focus" }),
      ...(ring ? [ring] : []),
      element("circle", { cx, cy, r: 5.5, style: "fill: var(--fl-ink); stroke: var(--fl-back)", "stroke-width": 1.5 }));
    }

    /** A point follows the pointer until it is released. The points are drawn anew meanwhile, so the window receives the events. */
    function drag(event) {
      const held = event.target.closest(".fl-point");
      if (!held) return;
      event.preventDefault();
      const [member, column] = held.dataset.point.split(",").map(Number), own = new AbortController(), options = { signal: own.signal };
      addEventListener("pointermove", (moved) => {
        const box = svg.getBoundingClientRect(), height = ((moved.clientY - box.top) / box.height) * HEIGHT;
        move(member, column, (BOTTOM - height) / (BOTTOM - TOP));
      }, options);
      for (const name of ["pointerup", "pointercancel"]) addEventListener(name, () => own.abort(), options);
      state.active = [member, column];
      held.focus({ preventScroll: true });  // not drawn anew yet: a touch that begins on a removed element scrolls the page
    }

    function drawTable(advantages, mark, selected) {
      const { values, rule } = state;
      const whole = credit.longTerm(values), single = credit.gains(values), sums = credit.lambdaGains(values, state.lambda);
      const cells = (numbers, used) => numbers.map((value, k) => element("td", { class: used(k) && "fl-used" }, signed(value)));
      const row = (label, ...tds) => element("tr", {}, element("th", { scope: "row" }, label), ...tds);
      const bodies = NAMES.map((name, member) => {
        const trend = whole[member][0], final = values[member][columns - 1];
        const head = element("tr", { class: "fl-member" }, element("th", { scope: "rowgroup", colspan: columns },
          `${name}: final reward ${final.toFixed(2)}, trend ${signed(trend)} ${trend > 0 ? "↑" : trend < 0 ? "↓" : ""}`));
        const isSelected = (k) => rule === "tp" && selected[member][k];
        return element("tbody", { "data-member": name }, head,
          row("gain", ...cells(single[member], (k) => rule === "gains" || (rule === "tp" && !isSelected(k)))),
          row("long-term", ...cells(whole[member], isSelected)),
          ...(rule === "lambda" ? [row("λ-weighted sum", ...cells(sums[member], () => true))] : []),
          element("tr", { class: "fl-advantages" }, element("th", { scope: "row" }, "advantage"), ...advantages[member].map((a, k) =>
            element("td", { style: `background: ${tint(a)}` }, `${mark(member, k)} ${signed(a)}`))));
      });
      const head = element("thead", {}, element("tr", {}, element("th", { scope: "col" }, "step"),
        ...single[0].map((_, k) => element("th", { scope: "col" }, String(k)))));
      table.replaceChildren(element("table", { class: "fl-numbers-table" }, head, ...bodies));
    }

    onWidth(chart, (now) => { width = now; draw(); });
    update({});
  }

  function start() {
    pathsFigure(document.getElementById("fl-paths"));
    curveFigure(document.getElementById("fl-curve"));
  }
  if (document.readyState === "loading") addEventListener("DOMContentLoaded", start);
  else start();
})();
