// Sends requests to the service: the API key, JSON, error messages, streams. URLs are relative to this file, so that
// the console works behind a path prefix.

const BASE = new URL("../", import.meta.url);
const NAME = "tinkex-key";
const TIMEOUT_MS = 20000;

/** `status` is 0 if there was no response. */
export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }

  /** Whether a retry may help. */
  get isPassing() {
    return this.status === 0 || this.status === 429 || this.status >= 500;
  }
}

// The key is stored as long as the tab is open; in a browser without storage, until the page is left.
let remembered = null;
try {
  remembered = sessionStorage.getItem(NAME);
} catch {
  remembered = null;
}

export function key() {
  return remembered;
}

/** Returns whether the key survives a reload of the page. */
export function setKey(value) {
  remembered = value;
  try {
    if (value === null) sessionStorage.removeItem(NAME);
    else sessionStorage.setItem(NAME, value);
    return true;
  } catch {
    return false;
  }
}

/** Takes a key out of `#key=…` and removes it from the address at once, before anything else can read it. */
export function takeKeyFromAddress() {
  const found = /^#key=([^&]+)/.exec(location.hash);
  if (!found) return;
  history.replaceState(null, "", location.pathname + location.search + "#/runs");
  try {
    setKey(decodeURIComponent(found[1]));
  } catch {
    setKey(found[1]); // a lone percent sign
  }
}

export const get = (path, options) => call("GET", path, options);
export const post = (path, options) => call("POST", path, options);
export const put = (path, options) => call("PUT", path, options);
export const patch = (path, options) => call("PATCH", path, options);
export const remove = (path, options) => call("DELETE", path, options);

async function call(method, path, { body, query, signal } = {}) {
  const asked = new AbortController();
  const timer = setTimeout(() => asked.abort(), TIMEOUT_MS);
  signal?.addEventListener("abort", () => asked.abort(), { once: true });
  try {
    const answer = await send(method, path, { body, query, signal: asked.signal });
    return await answer.json();
  } catch (problem) {
    if (problem instanceof ApiError || signal?.aborted) throw problem;
    throw new ApiError(0, "The service does not respond.");
  } finally {
    clearTimeout(timer);
  }
}

async function send(method, path, { body, query, signal }) {
  const headers = { accept: "application/json" };
  if (remembered) headers["x-api-key"] = remembered;
  if (body !== undefined) headers["content-type"] = "application/json";
  let answer;
  try {
    answer = await fetch(url(path, query), { method, headers, signal, body: body && JSON.stringify(body), cache: "no-store" });
  } catch (problem) {
    if (signal?.aborted) throw problem;
    throw new ApiError(0, "The service does not respond.");
  }
  if (answer.ok) return answer;
  const problem = new ApiError(answer.status, await said(answer));
  if (answer.status === 401) document.dispatchEvent(new CustomEvent("unauthorised", { detail: problem.message }));
  throw problem;
}

/** The address of an endpoint; a value of null is left out. */
export function url(path, query = {}) {
  const made = new URL(path, BASE);
  for (const [name, value] of Object.entries(query)) if (value !== null && value !== "") made.searchParams.set(name, value);
  return made;
}

async function said(answer) {
  try {
    const content = await answer.json();
    return content.detail ?? content.error?.message ?? `The service responded with status ${answer.status}.`;
  } catch {
    return `The service responded with status ${answer.status}.`;
  }
}

/** Yields the parsed events of a streamed response. */
export async function* stream(path, body, signal) {
  const answer = await send("POST", path, { body, signal });
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  while (true) {
    let piece;
    try {
      piece = await reader.read();
    } catch (problem) {
      if (signal.aborted) throw problem;
      throw new ApiError(0, "The stream was interrupted: the service does not respond.");
    }
    if (piece.done) throw new ApiError(0, "The stream ended early: the service may be restarting.");
    const lines = (rest + piece.value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (line === "data: [DONE]") return;
      if (!line.startsWith("data: ")) continue;
      const event = JSON.parse(line.slice(6));
      if (event.error) throw new ApiError(400, event.error.message);
      yield event;
    }
  }
}

/** Returns a path with each segment encoded; the id of a checkpoint contains slashes. */
export function path(...parts) {
  return parts.map((part) => part.split("/").map(encodeURIComponent).join("/")).join("/");
}

/** Returns the URL of this service, as programs should use it. */
export function serviceUrl() {
  return BASE.href.replace(/\/$/, "");
}
