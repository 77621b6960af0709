// Colors of the drafters, in the order in which they appear, and their legend.

const HUES = 6;
const DEEPEST = 8; // draft tokens that lie deeper have the same color
const known = new Map();

// Background of a token that this drafter proposed at this depth; null is the target itself.
export function markOf(source, depth) {
  if (source === null) return null;
  if (!known.has(source)) {
    known.set(source, known.size % HUES);
    showLegend();
  }
  const strength = 0.25 + (0.45 * Math.min(depth, DEEPEST)) / DEEPEST;
  return `oklch(var(--tone) var(--hue-${known.get(source)}) / ${strength})`;
}

export function showLegend() {
  const entries = [["model itself", null], ...[...known.keys()].map((name) => [name, markOf(name, 4)])];
  document.getElementById("legend").replaceChildren(
    ...entries.map(([name, mark]) => {
      const entry = document.createElement("span");
      entry.textContent = name;
      if (mark) entry.style.setProperty("--mark", mark);
      return entry;
    }),
  );
}
