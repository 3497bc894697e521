/* Uses every control of the figures in the frame as a reader would, and writes what happens as JSON; see test_figures.py. */
"use strict";

const chain = ["page"];  // ids or selectors of the frames, one within the other
const outer = document.getElementById(chain[0]);
const wait = (ms) => new Promise((resolve) => setTimeout(resolve, ms));

async function read() {
  await wait(4000);
  const frame = chain.slice(1).reduce((within, selector) => within.contentDocument.querySelector(selector), outer);
  const page = frame.contentDocument, view = frame.contentWindow;
  const result = { first: {}, controls: {}, unchanged: {}, broken: [], overlapping: [], theme: page.body.dataset.theme };
  result.picture = chain.length > 1 ? frame.previousElementSibling.style.display : "";
  for (const section of page.querySelectorAll(".fl-figure")) {
    const place = section.querySelector("[data-figure]"), name = section.id, unchanged = [];
    const state = () => [...place.querySelectorAll("svg, .fl-says, canvas")].map((part) => (part.tagName === "CANVAS" ? part.toDataURL() : part.outerHTML)).join("");
    const check = (label) => { if (/NaN|undefined|Infinity/.test(state())) result.broken.push(`${name}: ${label}`); };
    check("first");
    result.first[name] = [...place.querySelectorAll("output")].map((output) => output.textContent);
    let count = 0;
    const used = async (label, act) => {
      const before = state();
      act();
      await wait(0);
      count += 1;
      if (state() === before) unchanged.push(label);
      check(label);
    };
    for (const slider of place.querySelectorAll("input[type=range]")) {
      for (const value of [slider.max, slider.min, String((Number(slider.max) + Number(slider.min)) / 2)]) {
        const label = `${slider.closest("label").textContent} ${value}`, held = slider.value;
        slider.value = value;
        const moved = slider.value !== held;
        if (moved) await used(label, () => slider.dispatchEvent(new view.Event("input", { bubbles: true })));
      }
    }
    for (const choice of place.querySelectorAll("input[type=radio]:not(:checked), input[type=checkbox]")) await used(`${choice.name} ${choice.value}`, () => choice.click());
    for (const button of place.querySelectorAll("button")) await used(button.textContent, () => button.click());
    // texts of a chart do not cover each other
    for (const svg of place.querySelectorAll("svg")) {
      const boxes = [...svg.querySelectorAll("text")].map((text) => [text.textContent, text.getBoundingClientRect()]);
      boxes.forEach(([one, a], i) => boxes.slice(i + 1).forEach(([other, b]) => {
        const wide = Math.min(a.right, b.right) - Math.max(a.left, b.left), high = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
        if (wide > 2 && high > 5) result.overlapping.push(`${name}: ${one} / ${other}`);
      }));
    }
    result.controls[name] = count;
    result.unchanged[name] = unchanged;
  }
  result.overflow = page.documentElement.scrollWidth - view.innerWidth;
  const sizes = [...page.querySelectorAll(".fl-choices span, button, input[type=range]")].map((each) => each.getBoundingClientRect());
  result.smallest = Math.min(...sizes.filter((box) => box.width > 0).flatMap((box) => [box.width, box.height]).map((size) => Math.round(size)));
  return result;
}

const write = (result) => { document.getElementById("result").textContent = JSON.stringify(result); };
outer.addEventListener("load", () => read().then(write, (error) => write({ error: String(error.stack) })));
