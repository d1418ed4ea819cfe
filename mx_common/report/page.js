"use strict";
(() => {
  const figures = JSON.parse(document.getElementById("figures").textContent);
  const config = { displayModeBar: false, responsive: true };

  // plotly draws with colours only: the style sheet's variables are looked up, so that light and dark are said once
  const coloured = (value) => {
    const variable = typeof value === "string" && /^var\((--[a-z]+)\)$/.exec(value);
    if (variable) return getComputedStyle(document.documentElement).getPropertyValue(variable[1]).trim();
    if (Array.isArray(value)) return value.map(coloured);
    if (value && typeof value === "object") {
      return Object.fromEntries(Object.entries(value).map(([name, inner]) => [name, coloured(inner)]));
    }
    return value;
  };

  const drawAll = async () => {
    for (const [id, figure] of Object.entries(figures)) {
      const { data, layout } = coloured(figure);
      await Plotly.react(id, data, layout, config);
    }
    document.documentElement.dataset.drawn = Object.keys(figures).length;
  };

  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
  drawAll();
})();
