// Pictures as SVG: lines over time, and the draft tree of a step.

import { markOf } from "./colors.js";

const SVG = "http://www.w3.org/2000/svg";
const LEVEL = 74; // pixels between two depths of a tree
const LEAF = 34; // ... and between two of its leaves
const LONGEST = 9; // characters of a label

function element(name, attributes = {}, ...children) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

// A small chart: its name, the newest value, and a line for each series of numbers.
export function chart(name, unit, series) {
  const most = Math.max(1e-9, ...series.flat());
  const lines = series.map((values, i) => {
    const last = Math.max(1, values.length - 1);
    const point = (value, k) => `${((100 * k) / last).toFixed(2)},${(38 - (36 * value) / most).toFixed(2)}`;
    const points = (values.length === 1 ? [values[0], values[0]] : values).map(point);
    return element("path", { d: points.length ? `M${points.join("L")}` : "", class: i ? "second" : "first" });
  });
  const newest = series[0].at(-1);
  const value = document.createElement("b");
  value.textContent = newest === undefined ? "–" : `${newest.toFixed(newest < 10 ? 2 : 0)}${unit}`;
  const title = document.createElement("figcaption");
  title.append(name, value);
  const figure = document.createElement("figure");
  const axis = element("line", { x1: 0, x2: 100, y1: 39, y2: 39 });
  const label = `${name}: ${value.textContent}, at most ${most.toFixed(1)}`;
  const frame = { viewBox: "0 0 100 40", preserveAspectRatio: "none", role: "img", "aria-label": label };
  figure.append(title, element("svg", frame, axis, ...lines));
  return figure;
}

// Where nodes lie: a column for each depth, a row for each leaf; parents lie in the middle of their children.
function placed(nodes) {
  const children = nodes.map(() => []);
  const roots = [];
  nodes.forEach((node, i) => (node.parent < 0 ? roots : children[node.parent]).push(i));
  const places = [];
  let leaves = 0;
  const place = (i, depth) => {
    for (const child of children[i]) place(child, depth + 1);
    const below = children[i].map((child) => places[child].y);
    const y = below.length ? (below[0] + below.at(-1)) / 2 : LEAF * leaves++;
    places[i] = { x: LEVEL * depth, y, depth };
  };
  for (const root of roots) place(root, 1);
  const firsts = roots.map((root) => places[root].y);
  const middle = firsts.length ? (firsts[0] + firsts.at(-1)) / 2 : 0;
  return { places, root: { x: 0, y: middle }, rows: Math.max(1, leaves) };
}

const shown = (text) => {
  const visible = text.replaceAll("\n", "⏎").replaceAll(" ", "␣");
  return visible.length > LONGEST ? `${visible.slice(0, LONGEST - 1)}…` : visible;
};

function drawn(at, text, mark, kind) {
  const circle = element("circle", { r: 7 });
  if (mark) circle.style.fill = mark;
  const label = element("text", { y: 20, "text-anchor": "middle" }, shown(text));
  return element("g", { class: kind, transform: `translate(${at.x} ${at.y})` }, circle, label);
}

const edge = (from, to, kind) => {
  const middle = (from.x + to.x) / 2;
  const curve = `M${from.x} ${from.y}C${middle} ${from.y} ${middle} ${to.y} ${to.x} ${to.y}`;
  return element("path", { d: curve, class: kind });
};

// The tree that a step verified.  The target's own token hangs from the last accepted node.
export function tree({ nodes, emitted }) {
  const { places, root, rows } = placed(nodes);
  const kind = (node) => (node.accepted ? "accepted" : "dropped");
  const edges = nodes.map((node, i) => edge(places[node.parent] ?? root, places[i], kind(node)));
  const marks = nodes.map((node, i) => {
    return drawn(places[i], node.text, markOf(node.source, places[i].depth), kind(node));
  });
  const path = nodes.map((_, i) => i).filter((i) => nodes[i].accepted);
  const width = LEVEL * (Math.max(0, ...places.map((at) => at.depth)) + 2);
  const own = emitted.length > path.length ? emitted.at(-1) : null;
  if (own !== null) {
    const last = path.length ? places[path.at(-1)] : root;
    const at = { x: last.x + LEVEL, y: LEAF * rows };
    edges.push(edge(last, at, "accepted"));
    marks.push(drawn(at, own, null, "accepted"));
  }
  marks.push(drawn(root, "", null, "accepted"));
  const accepted = nodes.filter((node) => node.accepted).map((node) => node.text).join("");
  const height = LEAF * (rows + (own === null ? 0 : 1)) + 22;
  const counts = `${nodes.length} draft tokens, ${path.length} accepted`;
  const label = `${counts}: ${accepted}. The model's own: ${own ?? "none"}.`;
  const frame = { width, height, viewBox: `-34 -14 ${width} ${height}`, role: "img", "aria-label": label };
  return element("svg", frame, ...edges, ...marks);
}
