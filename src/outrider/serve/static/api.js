// Requests to the server: the API key, errors, and server-sent events.

const base = location.origin + location.pathname;
let key = sessionStorage.getItem("key") ?? "";

export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

export function useKey(given) {
  key = given;
  sessionStorage.setItem("key", given);
}

// The response of a GET, or with a body of a POST.  Throws Refused with the server's message.
export async function request(path, body, signal) {
  const headers = body ? { "Content-Type": "application/json" } : {};
  if (key) headers.Authorization = `Bearer ${key}`;
  const answer = await fetch(new URL(path, base), {
    method: body ? "POST" : "GET",
    body: body && JSON.stringify(body),
    credentials: "omit",
    headers,
    signal,
  });
  if (answer.ok) return answer;
  const told = await answer.json().catch(() => ({}));
  throw new Refused(answer.status, told.error?.message ?? `The server answers with status ${answer.status}.`);
}

// The events of a stream, parsed.  Throws Refused for an error among them.
export async function* events(path, body, signal) {
  const answer = await request(path, { ...body, stream: true }, signal);
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (let part = await reader.read(); !part.done; part = await reader.read()) {
    text += part.value;
    const blocks = text.split("\n\n");
    text = blocks.pop();
    for (const block of blocks) {
      const data = block.replace(/^data: /, "");
      if (data === "[DONE]") return;
      const event = JSON.parse(data);
      if (event.error) throw new Refused(Number(event.error.code) || 500, event.error.message);
      yield event;
    }
  }
}
