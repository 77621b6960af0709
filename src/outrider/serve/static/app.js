// The playground: a conversation with the server, and what its last answer tells of speculation.

import { Answer } from "./answer.js";
import { events, Refused, request, useKey } from "./api.js";
import { showLegend } from "./colors.js";
import { chart, tree } from "./pictures.js";

const $ = (id) => document.getElementById(id);
const conversation = $("conversation");
const hint = conversation.innerHTML;
let messages = [];
let running = null; // the AbortController of the answers that stream

class Invalid extends Error {}

// Value of a number field; null where it is empty.  Throws Invalid.
function number(id) {
  const field = $(id);
  if (!field.checkValidity()) {
    throw new Invalid(`${field.labels[0].textContent.trim()}: ${field.validationMessage}`);
  }
  return field.value === "" ? null : Number(field.value);
}

function schema() {
  const field = $("schema");
  field.ariaInvalid = "false";
  if (!field.value.trim()) return null;
  try {
    return JSON.parse(field.value);
  } catch (error) {
    field.ariaInvalid = "true";
    throw new Invalid(`The JSON schema is no JSON: ${error.message}`);
  }
}

// Body of a request for the next reply, without its messages or prompt.
function settings() {
  const body = { model: $("model").value, return_origins: true, max_tokens: number("max_tokens") };
  for (const name of ["temperature", "top_p", "top_k", "min_p"]) body[name] = number(name) ?? undefined;
  body.seed = number("seed") ?? Math.floor(Math.random() * 2 ** 31);
  const choice = $("speculation").value;
  body.speculation = { enabled: choice !== "off", max_tokens: number("max_draft") ?? undefined };
  if (!["on", "off"].includes(choice)) body.speculation.method = choice;
  const form = schema();
  if (form) body.response_format = { type: "json_schema", json_schema: { name: "answer", schema: form } };
  if ($("prediction").value) body.prediction = { type: "content", content: $("prediction").value };
  return body;
}

// Path and body of a request, with the conversation or the text to continue.
function asked(prompt) {
  const body = settings();
  const count = number("alternatives") ?? 0;
  if ($("mode").value === "text") {
    return ["v1/completions", { ...body, prompt, logprobs: count || undefined }];
  }
  const system = $("system").value ? [{ role: "system", content: $("system").value }] : [];
  const more = count ? { logprobs: true, top_logprobs: count } : {};
  more.separate_reasoning = false; // tokens have their places in the whole text
  return ["v1/chat/completions", { ...body, ...more, messages: [...system, ...messages] }];
}

// Stream one answer.  The watched one is drawn beside the conversation, too.
async function stream(answer, path, body, watched) {
  for await (const event of events(path, body, running.signal)) {
    for (const choice of event.choices) {
      const draft = answer.add(choice);
      if (watched && draft) $("tree").replaceChildren(tree(draft));
    }
    if (watched) showCharts(answer.history);
    follow();
  }
}

function showCharts({ perStep, rate, cost }) {
  $("charts").replaceChildren(
    chart("Tokens per step", "", [perStep]),
    chart("Rate, tokens/s", "", [rate]),
    chart("Cost, draft tokens per token", "", [cost]),
  );
}

// Keep the end of the conversation in sight, unless the reader has gone up.  In a narrow window, where the
// page scrolls and not the conversation, that is the composer below it.
function follow() {
  const left = conversation.scrollHeight - conversation.scrollTop - conversation.clientHeight;
  if (left < 120) conversation.scrollTop = conversation.scrollHeight;
  const below = $("composer").getBoundingClientRect().bottom - innerHeight;
  if (below > 0 && below < 120) scrollBy(0, below);
}

// Add a prompt and its answers to the conversation.  Returns their elements.
function show(prompt, answers) {
  conversation.querySelector(".hint")?.remove();
  const mine = document.createElement("p");
  mine.className = "mine";
  mine.textContent = prompt;
  const runs = document.createElement("div");
  runs.className = "runs";
  runs.append(...answers.map((answer) => answer.element));
  conversation.append(mine, runs);
  conversation.scrollTop = conversation.scrollHeight;
  $("composer").scrollIntoView({ block: "nearest" });
  return [mine, runs];
}

// Ask with and, in a race, without speculation.  Both answers have the same seed and so the same text.
async function send() {
  const prompt = $("prompt").value;
  if (running || !prompt.trim()) return;
  const turns = messages; // a new conversation may begin meanwhile
  let answers = [];
  let elements = [];
  let complete = false;
  $("failure").textContent = "";
  turns.push({ role: "user", content: prompt });
  try {
    const [path, body] = asked(prompt);
    const titles = $("race").checked ? ["With speculation", "Without speculation"] : [""];
    answers = titles.map((title) => new Answer(title, body.max_tokens));
    busy(new AbortController());
    elements = show(prompt, answers);
    $("prompt").value = "";
    const plain = { ...body, speculation: { enabled: false } };
    await Promise.all(answers.map((answer, i) => stream(answer, path, i ? plain : body, !i)));
    complete = true;
    if (answers.length > 1) verdict(answers);
  } catch (error) {
    failed(error);
  }
  running?.abort(); // the other answer of a race
  for (const answer of answers) answer.element.ariaBusy = "false";
  if (complete || answers[0]?.text) turns.push({ role: "assistant", content: answers[0].text });
  else takeBack(turns, elements);
  busy(null);
}

// Take back the last prompt, which has no answer.  It can be edited and sent again.
function takeBack(turns, elements) {
  const { content } = turns.pop();
  for (const element of elements) element.remove();
  if (turns === messages) $("prompt").value ||= content;
}

function verdict([fast, plain]) {
  const same = fast.text === plain.text ? "The same text" : "Different texts";
  const line = document.createElement("p");
  line.className = "facts";
  line.textContent =
    `${same}: ${fast.seconds.toFixed(2)} s with and ${plain.seconds.toFixed(2)} s without speculation, ` +
    `${(plain.seconds / fast.seconds).toFixed(2)} times as fast. They shared the steps of the server.`;
  conversation.append(line);
  follow();
}

function busy(controller) {
  running = controller;
  $("send").disabled = controller !== null;
  $("stop").hidden = controller === null;
}

function failed(error) {
  if (error.name === "AbortError") return;
  if (error.status === 401) $("door").showModal();
  else $("failure").textContent = error.message;
}

// Fill in what the server says of itself.
async function meet() {
  try {
    const { data } = await (await request("v1/models")).json();
    $("model").replaceChildren(...data.map(({ id }) => new Option(id)));
    const fixed = [new Option("On", "on"), new Option("Off", "off")];
    const loaded = data[0].speculative_methods;
    const methods = loaded.length > 1 ? loaded : [];
    $("speculation").replaceChildren(...fixed, ...methods.map((name) => new Option(`Only ${name}`, name)));
    $("door").close();
  } catch (error) {
    const wrong = error instanceof Refused && error.status === 401 && $("key").value;
    $("wrong-key").textContent = wrong ? error.message : "";
    failed(error);
  }
}

$("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
$("prompt").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  send();
});
$("unlock").addEventListener("submit", (event) => {
  event.preventDefault();
  useKey($("key").value);
  meet();
});
$("settings").addEventListener("submit", (event) => event.preventDefault());
$("stop").addEventListener("click", () => running?.abort());
addEventListener("keydown", (event) => event.key === "Escape" && running?.abort());
$("clear").addEventListener("click", () => {
  running?.abort();
  messages = [];
  conversation.innerHTML = hint;
  $("prompt").focus();
});
showLegend();
showCharts({ perStep: [], rate: [], cost: [] });
meet();
