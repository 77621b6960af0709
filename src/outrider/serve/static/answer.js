// One answer as it streams: tokens in the color of their origin, what else was likely, and its figures.

import { markOf } from "./colors.js";

const details = document.getElementById("details");

function made(name, kind, text = "") {
  const element = document.createElement(name);
  if (kind) element.className = kind;
  element.textContent = text;
  return element;
}

// Log-probabilities of chat completions, also from the lists of text completions.
function entries(logprobs) {
  if (!logprobs?.tokens) return logprobs?.content ?? [];
  return logprobs.tokens.map((token, i) => {
    const best = Object.entries(logprobs.top_logprobs[i] ?? {});
    return { token, top_logprobs: best.map(([text, logprob]) => ({ token: text, logprob })) };
  });
}

export class Answer {
  // characters: of the text, by code points, as the server counts.  tokens: {source, depth, start, end}.
  // alternatives: entries of log-probabilities, by token.
  constructor(title, most) {
    this.text = "";
    this.characters = [];
    this.tokens = [];
    this.alternatives = [];
    this.history = { perStep: [], rate: [], cost: [] };
    this.steps = 0;
    this.drafted = 0;
    this.drawn = 0;
    this.selected = -1;
    this.most = most;
    this.began = performance.now();
    this.seconds = 0;
    this.reason = null;
    this.element = made("article", "run");
    this.element.ariaBusy = "true"; // a screen reader reads the answer once it is complete
    this.body = made("div", "text");
    this.facts = made("p", "facts");
    this.bar = made("div");
    const progress = made("div", "progress");
    progress.append(this.bar);
    progress.hidden = !title;
    this.element.append(...(title ? [made("h3", "", title)] : []), progress, this.body, this.facts);
    this.body.tabIndex = 0;
    this.body.role = "group";
    this.body.ariaLabel = `${title || "Answer"}: arrow keys select a token`;
    this.body.addEventListener("pointerover", (event) => this.show(Number(event.target.dataset?.at ?? -1)));
    this.body.addEventListener("pointerleave", (event) => {
      if (event.pointerType !== "touch") this.show(-1); // a finger leaves as soon as it is lifted
    });
    this.body.addEventListener("blur", () => this.show(-1));
    this.body.addEventListener("keydown", (event) => this.move(event));
  }

  // Take in one choice of an event.  Returns the draft tree of its last step, if it tells one.
  add(choice) {
    const added = choice.delta?.content ?? choice.text ?? "";
    this.text += added;
    this.characters.push(...added);
    this.reason = choice.finish_reason ?? this.reason;
    this.alternatives.push(...entries(choice.logprobs));
    const told = choice.outrider;
    if (!told) return null;
    for (const [source, depth, end] of told.tokens) {
      this.tokens.push({ source, depth, start: this.tokens.at(-1)?.end ?? 0, end });
    }
    this.seconds = (performance.now() - this.began) / 1000;
    if (told.steps > this.steps) {
      const { perStep, rate, cost } = this.history;
      perStep.push(told.tokens.length / (told.steps - this.steps));
      rate.push(this.tokens.length / this.seconds);
      cost.push((told.drafted - this.drafted) / Math.max(1, told.tokens.length));
      this.steps = told.steps;
      this.drafted = told.drafted;
    }
    this.draw();
    return told.tree;
  }

  draw() {
    for (; this.drawn < this.tokens.length; this.drawn++) {
      const { source, depth, start, end } = this.tokens[this.drawn];
      if (end <= start) continue; // a special token, or a part of a character
      const span = made("span", "token", this.characters.slice(start, end).join(""));
      span.dataset.at = this.drawn;
      const mark = markOf(source, depth);
      if (mark) span.style.setProperty("--mark", mark);
      this.body.append(span);
    }
    const count = this.tokens.length;
    const figures = [
      `${count} tokens`,
      `${this.steps} ${this.steps === 1 ? "step" : "steps"}`,
      `${(count / Math.max(1, this.steps)).toFixed(2)} tokens per step`,
      `${(count / this.seconds).toFixed(0)} tokens/s`,
      `${this.seconds.toFixed(2)} s`,
    ];
    if (this.reason && this.reason !== "stop") figures.push(`ended by ${this.reason}`);
    this.facts.textContent = figures.join(" · ");
    this.bar.style.width = `${this.reason ? 100 : Math.min(100, (100 * count) / this.most)}%`;
  }

  move(event) {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step) return;
    event.preventDefault();
    let at = this.selected + step;
    while (this.tokens[at] && this.tokens[at].end <= this.tokens[at].start) at += step;
    if (this.tokens[at]) this.show(at);
  }

  // Show what is known of a token, or hide it for -1.
  show(at) {
    this.body.querySelector(".selected")?.classList.remove("selected");
    this.selected = at;
    const span = at < 0 ? null : this.body.querySelector(`[data-at="${at}"]`);
    details.hidden = !span;
    if (!span) return;
    span.classList.add("selected");
    const { source, depth } = this.tokens[at];
    const drafted = `Drafted by ${source}, token ${depth} of its draft`;
    const origin = source === null ? "The model's own token" : drafted;
    details.replaceChildren(made("div", "", origin), this.likely(at));
    const box = span.getBoundingClientRect();
    const left = Math.min(box.left, innerWidth - details.offsetWidth - 12);
    const above = box.bottom + details.offsetHeight + 12 > innerHeight;
    details.style.left = `${Math.max(8, left)}px`;
    details.style.top = `${above ? box.top - details.offsetHeight - 6 : box.bottom + 6}px`;
  }

  // Table of the most probable tokens at a place.
  likely(at) {
    const table = made("table");
    const entry = this.alternatives[at];
    for (const other of entry?.top_logprobs ?? []) {
      const row = table.insertRow();
      row.className = other.token === entry.token ? "chosen" : "";
      row.insertCell().append(made("code", "", other.token.replaceAll("\n", "⏎")));
      const probability = Math.exp(other.logprob);
      const meter = made("meter");
      meter.value = probability;
      meter.ariaLabel = "Probability";
      row.insertCell().append(meter);
      row.insertCell().textContent = `${(100 * probability).toFixed(1)} %`;
    }
    return table;
  }
}
