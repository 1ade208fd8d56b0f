// Shows sampled text as tokens; each shows its log-probability on hover, or when an arrow key reaches it.

import { h } from "./dom.js";
import { minus } from "./format.js";

/** The text of one sample. `add(text, tokens)` appends a chunk; tokens are { text, logprob }. */
export function tokenText(label) {
  const tip = h("div", {
    class: "tip",
    role: "tooltip",
    id: `tip-${(tokenText.made = (tokenText.made ?? 0) + 1)}`,
    hidden: true,
  });
  const text = h("div", { class: "tokens", role: "group", "aria-label": label });
  const element = h("div", { class: "token-box" }, text, tip);
  let logprobs = 0;
  let tokens = 0;

  element.clear = () => {
    text.replaceChildren();
    tip.hidden = true;
    logprobs = 0;
    tokens = 0;
  };
  /** Text that was not sampled. */
  element.before = (given) => text.append(h("span", { class: "given" }, given));
  element.add = (piece, found) => {
    const isWhole = found.map((token) => token.text).join("") === piece;
    // Tokens that are parts of one character, or of a stop string that is not shown, are grouped.
    const groups = isWhole ? found.map((token) => [token.text, [token]]) : [[piece, found]];
    for (const [shown, group] of groups)
      if (group.length > 0 || shown) text.append(span(shown, group, tip.id, tokens === 0));
    tokens += found.length;
    for (const token of found) logprobs += token.logprob;
  };
  element.told = () => ({ tokens, mean: tokens ? logprobs / tokens : null });

  const show = (target) => {
    if (!target?.tip) {
      tip.hidden = true;
      return;
    }
    tip.replaceChildren(...target.tip.map((line) => h("span", {}, line)));
    tip.hidden = false;
    const box = element.getBoundingClientRect();
    const [place] = target.getClientRects();
    const at = place ?? target.getBoundingClientRect();
    const left = Math.min(Math.max(0, at.left - box.left), Math.max(0, box.width - tip.offsetWidth));
    tip.style.left = `${left}px`;
    tip.style.top = `${at.bottom - box.top + 6}px`;
  };
  text.addEventListener("pointerover", (event) => show(event.target.closest(".token")));
  text.addEventListener("pointerleave", () =>
    show(text.contains(document.activeElement) ? document.activeElement : null),
  );
  text.addEventListener("focusin", (event) => show(event.target));
  text.addEventListener("focusout", () => show(null));
  text.addEventListener("keydown", (event) => move(event, text));
  return element;
}

function span(shown, group, tipId, isFirst) {
  const logprob = group.reduce((sum, token) => sum + token.logprob, 0);
  const made = h(
    "span",
    {
      class: `token is-${surprise(logprob)}${shown ? "" : " is-end"}`,
      tabindex: isFirst ? "0" : "-1",
      "aria-describedby": tipId,
    },
    shown || group.map((token) => token.text).join("") || "end",
  );
  made.tip = group.map(
    (token) => `${visible(token.text)}  ${minus(token.logprob.toFixed(3))}  ${percent(token.logprob)}`,
  );
  return made;
}

/** One tab stop for the whole text; the arrow keys move inside it. */
function move(event, text) {
  const all = [...text.querySelectorAll(".token")];
  const at = all.indexOf(document.activeElement);
  const to = {
    ArrowRight: at + 1,
    ArrowDown: at + 1,
    ArrowLeft: at - 1,
    ArrowUp: at - 1,
    Home: 0,
    End: all.length - 1,
  }[event.key];
  if (to === undefined || at < 0) return;
  event.preventDefault();
  const next = all[Math.max(0, Math.min(all.length - 1, to))];
  all[at].tabIndex = -1;
  next.tabIndex = 0;
  next.focus();
}

function surprise(logprob) {
  if (logprob > Math.log(0.5)) return "sure";
  if (logprob > Math.log(0.1)) return "likely";
  return logprob > Math.log(0.01) ? "unlikely" : "rare";
}

function percent(logprob) {
  const p = 100 * Math.exp(logprob);
  return `${p >= 99.95 ? "100" : p >= 0.1 ? p.toFixed(1) : p >= 0.001 ? p.toFixed(3) : "<0.001"} %`;
}

/** A token's text with invisible characters made visible. */
function visible(text) {
  return `“${text.replaceAll("\n", "↵").replaceAll("\t", "⇥")}”`;
}
