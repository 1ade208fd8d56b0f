// One column of the playground: a model, and the text that streams from it.

import { stream } from "./api.js";
import { h, notice, setText } from "./dom.js";
import { minus } from "./format.js";
import { nameOf, runIn } from "./names.js";
import { tokenText } from "./tokens.js";

const OTHER = "other";

export function makeColumn(number, kept) {
  const choice = h("select", { id: `model-${number}` });
  const other = h("input", {
    id: `path-${number}`,
    type: "text",
    spellcheck: "false",
    placeholder: "tinker://…/sampler_weights/…",
    "aria-label": `Path of model ${number}`,
    hidden: true,
  });
  const output = h("div", { class: "output" });
  const told = h("p", { class: "muted num told", role: "status" });
  const element = h(
    "section",
    { class: "card column", "aria-label": `Model ${number}` },
    h("label", { for: `model-${number}` }, `Model ${number}`),
    choice,
    other,
    output,
    told,
  );
  let messages = [];

  choice.addEventListener("change", () => {
    other.hidden = choice.value !== OTHER;
    kept.model = choice.value;
    if (!other.hidden) other.focus();
  });
  other.addEventListener("input", () => {
    kept.path = other.value;
  });

  /** `models` are { id, names }: the id to request, and its names to show. */
  element.offer = (models) => {
    const adapters = models.filter(({ id }) => id.startsWith("tinker://"));
    const bases = models.filter((model) => !adapters.includes(model));
    const option = ({ id }) => h("option", { value: id }, named(id));
    choice.replaceChildren(
      h("optgroup", { label: "Base models" }, ...bases.map(option)),
      ...(adapters.length > 0 ? [h("optgroup", { label: "Your checkpoints" }, ...adapters.map(option))] : []),
      h("option", { value: OTHER }, "Another path…"),
    );
    // By default the first column has the base model, and the next ones the newest checkpoints.
    const wanted = kept.model ?? [bases[0], ...adapters, ...bases.slice(1)][number - 1]?.id ?? bases[0]?.id;
    const known = models.find(({ names }) => names.includes(wanted));
    if (!known && wanted?.startsWith("tinker://")) kept.path = wanted;
    choice.value = known?.id ?? OTHER;
    other.value = kept.path ?? "";
    other.hidden = choice.value !== OTHER;
  };
  element.forget = () => {
    messages = [];
    output.replaceChildren();
    setText(told, "");
  };
  element.model = () => (choice.value === OTHER ? other.value.trim() : choice.value);

  /** Samples until the end or until `signal`, and shows the result below the text. */
  element.sample = async (asked, signal) => {
    const text = tokenText(`Sample of model ${number}. Arrow keys move from token to token.`);
    if (asked.isChat) output.append(turn("You", h("p", { class: "said" }, asked.text)), turn("Model", text));
    else {
      output.replaceChildren(text);
      text.before(asked.text);
    }
    const sent = asked.isChat ? [...messages, { role: "user", content: asked.text }] : [];
    const [address, body] = request(element.model(), asked, sent);
    const began = performance.now();
    let reason = null;
    let answer = "";
    let first = null;
    setText(told, "Waiting for the first token…");
    try {
      for await (const event of stream(address, body, signal)) {
        for (const part of event.choices) {
          const piece = (asked.isChat ? part.delta.content : part.text) ?? "";
          first ??= performance.now();
          answer += piece;
          text.add(piece, tokensOf(part.logprobs));
          reason = part.finish_reason ?? reason;
        }
      }
      setText(told, summary(text.told(), reason, began, first));
    } catch (problem) {
      if (signal.aborted) setText(told, summary(text.told(), "stopped here", began, first));
      else {
        output.append(notice(problem.message));
        setText(told, "");
        return; // a conversation goes on as if it had not been asked
      }
    }
    if (asked.isChat) messages = [...sent, { role: "assistant", content: answer }];
  };
  return element;
}

function request(model, asked, messages) {
  const { temperature, top_p, max_tokens, seed, system } = asked;
  const body = { model, temperature, top_p, max_tokens, stream: true, ...(seed === null ? {} : { seed }) };
  if (!asked.isChat) return ["v1/completions", { ...body, prompt: asked.text, logprobs: 0 }];
  const all = system ? [{ role: "system", content: system }, ...messages] : messages;
  return ["v1/chat/completions", { ...body, messages: all, logprobs: true }];
}

/** Reads both formats of OpenAI's log-probabilities. */
function tokensOf(logprobs) {
  if (!logprobs) return [];
  if (logprobs.content) return logprobs.content.map(({ token, logprob }) => ({ text: token, logprob }));
  return logprobs.tokens.map((text, n) => ({ text, logprob: logprobs.token_logprobs[n] }));
}

function summary({ tokens, mean }, reason, began, first) {
  const seconds = (performance.now() - (first ?? began)) / 1000;
  const parts = [`${tokens} ${tokens === 1 ? "token" : "tokens"}`];
  if (tokens > 1 && seconds > 0) parts.push(`${((tokens - 1) / seconds).toFixed(1)} tokens/s`);
  if (mean !== null) parts.push(`mean log-probability ${minus(mean.toFixed(2))}`);
  parts.push({ stop: "ended by itself", length: "ended at the limit" }[reason] ?? reason ?? "");
  return parts.filter(Boolean).join(" · ");
}

function turn(who, content) {
  return h("div", { class: `turn is-${who.toLowerCase()}` }, h("p", { class: "muted who" }, who), content);
}

/** `tinker://run/sampler_weights/name` as "name · run". */
function named(id) {
  return id.startsWith("tinker://") ? `${id.split("/").slice(4).join("/")} · ${nameOf(runIn(id))}` : id;
}
