// What a run's model wrote at its steps, latest first; or one prompt through all of them.

import { cell, fill, h, row, setText, table } from "./dom.js";
import { count, plural, value } from "./format.js";

const PAGE = 10;
const MOST_CHOICES = 50;

/** An element with a method `show(samples)`. */
export function sampleTable() {
  let most = PAGE;
  let samples = [];
  const rows = h("tbody");
  const choice = h("select", { id: "prompt-choice" });
  const more = h("button", { type: "button", class: "small" }, "Show more");
  const told = h("span", { class: "muted num" });
  const titles = [">Step", "Prompt", "Text", ">Reward", "Metadata"];
  const element = h(
    "div",
    {},
    h("p", { class: "filters" }, h("label", { for: "prompt-choice" }, "Prompt"), choice),
    h("div", { class: "card table samples" }, table(titles, rows)),
    h("p", { class: "pager" }, told, more),
  );

  function draw() {
    const wanted = choice.value;
    const shown = samples.filter((sample) => wanted === "" || sample.prompt === wanted);
    fill(rows, `${wanted}\n${shown.length}\n${most}\n${samples[0]?.number}`, () => shown.slice(0, most).map(makeRow));
    more.hidden = shown.length <= most;
    setText(told, `${count(Math.min(most, shown.length))} of ${plural(shown.length, "sample")}`);
  }
  choice.addEventListener("change", () => {
    most = PAGE;
    draw();
  });
  more.addEventListener("click", () => {
    most += PAGE * 2;
    draw();
  });
  element.show = (found) => {
    if (found[found.length - 1]?.number === samples[0]?.number) return;
    samples = [...found].reverse();
    const prompts = [...new Set(samples.map((sample) => sample.prompt ?? ""))].filter(Boolean).slice(0, MOST_CHOICES);
    fill(choice, JSON.stringify(prompts), () => [
      h("option", { value: "" }, "All prompts"),
      ...prompts.map((prompt) => h("option", { value: prompt, selected: prompt === choice.value }, prompt.slice(0, 80))),
    ]);
    draw();
  };
  return element;
}

function makeRow(sample) {
  const extra = Object.entries(sample.metadata ?? {}).map(([name, x]) => `${name}: ${x}`);
  return row(
    cell("Step", "right num", sample.step === null || sample.step === undefined ? "" : count(sample.step)),
    cell("Prompt", "wide said", sample.prompt ?? ""),
    cell("Text", "wide said", sample.text ?? ""),
    cell("Reward", "right num", typeof sample.reward === "number" ? value(sample.reward) : ""),
    cell(extra.length ? "Metadata" : "", "small-text muted", extra.join(" · ")),
  );
}
