// Draws every formula with the copy of KaTeX in _static/katex, without a network. Without JavaScript the LaTeX source remains.
document.addEventListener("DOMContentLoaded", () => {
  for (const formula of document.querySelectorAll("span.math, div.math")) {
    katex.render(formula.textContent, formula, { displayMode: formula.tagName === "DIV", throwOnError: false });
  }
});
