/* What the interactive pages share: elements, controls and charts. Styles are in page.css. */
"use strict";

(function (root) {
  // Elements and numbers

  function element(name, attributes = {}, ...children) {
    const svg = ["svg", "g", "line", "circle", "path", "rect", "text", "title"].includes(name);
    const made = svg ? document.createElementNS("http://www.w3.org/2000/svg", name) : document.createElement(name);
    for (const [key, value] of Object.entries(attributes)) {
      if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
      else if (value !== false && value !== undefined) made.setAttribute(key, value === true ? "" : value);
    }
    made.append(...children);
    return made;
  }

  const signed = (value, digits = 2) => {
    const text = Math.abs(value).toFixed(digits);
    return (Number(text) === 0 ? "" : value < 0 ? "−" : "+") + text;
  };

  /** One colour map for all advantages: grey at 0, full colour from 2 on. */
  function colour(advantage) {
    const share = Math.round(Math.min(Math.abs(advantage) / 2, 1) * 100);
    return `color-mix(in srgb, var(--fl-${advantage < 0 ? "down" : "up"}) ${share}%, var(--fl-zero))`;
  }

  const tint = (advantage) => `color-mix(in srgb, ${colour(advantage)} 40%, var(--fl-back))`;

  /** A group of radio buttons; `choices`: [value, label]. */
  function radios(legend, name, choices, change, numbers = false) {
    const inputs = choices.map(([value, label]) => [
      element("input", { type: "radio", name, value, "aria-label": numbers && `${legend} ${label}`, onchange: () => change(value) }), label]);
    const box = element("div", { class: numbers ? "fl-choices fl-numbers" : "fl-choices" },
      ...inputs.map(([input, label]) => element("label", {}, input, element("span", {}, label))));
    const set = element("fieldset", {}, element("legend", {}, legend), box);
    return { set, show: (value) => inputs.forEach(([input]) => { input.checked = input.value === String(value); }) };
  }

  function range(label, attributes, input) {
    const output = element("output", {});
    const slider = element("input", { type: "range", ...attributes, oninput: () => input(Number(slider.value)) });
    const box = element("label", { class: "fl-range" }, label, slider, output);
    return { box, limit: (max) => { slider.max = max; }, show: (value, text) => { slider.value = value; output.textContent = text; } };
  }

  const legend = () => element("div", { class: "fl-legend", "aria-hidden": "true" },
    "−2 less likely", element("i"), "more likely +2");

  /** Calls `draw(width)` now and when the width changes. */
  function onWidth(box, draw) {
    let width = 0;
    const measure = () => {
      const now = Math.round(box.clientWidth);
      if (now !== width && now > 0) draw(width = now);
    };
    new ResizeObserver(() => requestAnimationFrame(measure)).observe(box);
    measure();
  }

  /** A group of check boxes; `labels` in order, `change` gets the list of those that are set. */
  function checks(legend, labels, change) {
    const inputs = labels.map((label) => element("input", { type: "checkbox", "aria-label": `${legend} ${label}`,
      onchange: () => change(inputs.map((input) => input.checked)) }));
    const box = element("div", { class: "fl-choices fl-numbers" },
      ...inputs.map((input, k) => element("label", {}, input, element("span", {}, String(labels[k])))));
    const set = element("fieldset", {}, element("legend", {}, legend), box);
    return { set, show: (values) => inputs.forEach((input, k) => { input.checked = values[k]; }) };
  }

  const button = (label, onclick) => element("button", { type: "button", onclick }, label);

  /** Where the result of a control is said. */
  const says = () => element("p", { class: "fl-says", "aria-live": "polite" });

  // Charts

  /** Style of a text that crosses lines. */
  const HALO = "paint-order: stroke; stroke: var(--fl-back); stroke-width: 4px";

  const lineThrough = (points) => `M${points.map(([x, y]) => `${x.toFixed(1)} ${y.toFixed(1)}`).join("L")}`;

  /** One path for many points, drawn as round ends of lines without length. */
  const dots = (points, size, style) => element("path", { d: points.map(([x, y]) => `M${x.toFixed(1)} ${y.toFixed(1)}h0`).join(""),
    style, fill: "none", "stroke-width": size, "stroke-linecap": "round" });

  /** An SVG with axes: `x` and `y` are ranges, ticks are numbers or [number, text], margins are top, right, bottom, left.
      Returns the SVG, the scales, and `line`, `dots`, `text` and `rect`, which draw in units of the axes. */
  function chart({ width, height, x, y, xTicks = [], yTicks = [], xTitle, title, label, margins = [26, 8, 36, 36] }) {
    const [top, right, bottom, left] = margins;
    const svg = element("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label ?? title });
    const atX = (v) => left + ((v - x[0]) / (x[1] - x[0])) * (width - left - right);
    const atY = (v) => height - bottom - ((v - y[0]) / (y[1] - y[0])) * (height - top - bottom);
    const place = (points) => points.map(([a, b]) => [atX(a), atY(b)]);
    const pair = (tick) => (Array.isArray(tick) ? tick : [tick, String(tick).replace("-", "−")]);
    for (const [v, text] of yTicks.map(pair)) {
      svg.append(element("line", { x1: left, x2: width - right, y1: atY(v), y2: atY(v), style: "stroke: var(--fl-grid)" }),
        element("text", { x: left - 6, y: atY(v) + 4, "text-anchor": "end", class: "fl-soft" }, text));
    }
    for (const [v, text] of xTicks.map(pair)) {
      svg.append(element("text", { x: atX(v), y: height - bottom + 15, "text-anchor": "middle", class: "fl-soft" }, text));
    }
    if (xTitle) svg.append(element("text", { x: (left + width - right) / 2, y: height - 5, "text-anchor": "middle", class: "fl-soft" }, xTitle));
    if (title) svg.append(element("text", { x: left, y: 14, "font-weight": 600 }, title));
    const add = (made) => { svg.append(made); return made; };
    return {
      svg, x: atX, y: atY, add,
      line: (points, style, size = 2, dash = false) => add(element("path", { d: lineThrough(place(points)), fill: "none", style,
        "stroke-width": size, "stroke-linejoin": "round", "stroke-dasharray": dash })),
      dots: (points, size, style) => add(dots(place(points), size, style)),
      text: (a, b, text, options = {}) => add(element("text", { x: atX(a), y: atY(b), ...options }, text)),
      rect: (x0, x1, y0, y1, style) => add(element("rect", { x: Math.min(atX(x0), atX(x1)), y: Math.min(atY(y0), atY(y1)),
        width: Math.abs(atX(x1) - atX(x0)), height: Math.abs(atY(y1) - atY(y0)), style })),
    };
  }

  /** The arrow from one point of the SVG to another. */
  function arrow([x0, y0], [x1, y1], style, size = 2) {
    const angle = Math.atan2(y1 - y0, x1 - x0), long = Math.min(Math.hypot(x1 - x0, y1 - y0), 4 * size);
    const side = (turn) => `L${x1 - long * Math.cos(angle + turn)} ${y1 - long * Math.sin(angle + turn)}`;
    return element("path", { d: `M${x0} ${y0}L${x1} ${y1}M${x1} ${y1}${side(0.45)}M${x1} ${y1}${side(-0.45)}`, fill: "none", style,
      "stroke-width": size, "stroke-linecap": "round" });
  }

  // Figures of the course

  /** Draws a figure in its places on the page, with the values that data-start has for its controls; an address with ?figure=NAME shows that one alone. */
  function figure(name, draw) {
    const only = new URLSearchParams(location.search).get("figure");
    for (const place of document.querySelectorAll(`[data-figure="${name}"]`)) {
      place.closest("section").hidden = only !== null && only !== name;
      if (only === null || only === name) draw(place, JSON.parse(place.dataset.start ?? "{}"));
    }
    if (only !== null) document.querySelectorAll(".fl-opening").forEach((opening) => { opening.hidden = true; });
  }

  /** Within a frame of a notebook or of the site: its theme, and the frame's height. */
  function inFrame() {
    const frame = window.frameElement;
    if (!frame) return;
    const outer = frame.ownerDocument.body, body = document.body;
    const theme = () => {
      const { jpThemeLight, theme: own } = outer.dataset;
      const known = own === "light" || own === "dark" ? own : jpThemeLight && (jpThemeLight === "true" ? "light" : "dark");
      if (known) body.dataset.theme = known;
    };
    theme();
    new MutationObserver(theme).observe(outer, { attributes: true });
    const fit = () => {
      const height = `${Math.ceil(document.body.getBoundingClientRect().height) + 2}px`;
      frame.style.position = "static";  // in place of the picture below it
      if (frame.style.height !== height) frame.style.height = height;
      const picture = frame.previousElementSibling;
      if (picture) picture.style.display = "none";
    };
    new ResizeObserver(fit).observe(document.body);
    fit();
  }

  root.flowrlDraw = { HALO, arrow, button, chart, checks, colour, dots, element, figure, inFrame, legend, lineThrough, onWidth, radios, range, says, signed, tint };
})(window);
