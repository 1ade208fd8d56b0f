// What the list of runs shows while there is none: how to start the first.

import { key, serviceUrl } from "./api.js";
import { code, h } from "./dom.js";

/** The example program of ten lines; a test runs it. */
export function tenLines(url, model) {
  return `import tinkex

with tinkex.ServiceClient(base_url="${url}") as service:
    training = service.create_lora_training_client("${model}", rank=8, user_metadata={"name": "first run"})
    tokens = training.get_tokenizer().encode("The capital of France is Paris.")
    inputs = {"target_tokens": tokens[1:], "weights": [1.0] * (len(tokens) - 1)}
    datum = tinkex.Datum(tinkex.ModelInput.from_ints(tokens[:-1]), inputs)
    for _ in range(20):
        training.forward_backward([datum], "cross_entropy")
        training.optim_step(tinkex.AdamParams(learning_rate=1e-3)).result()
    training.save_weights_for_sampler("first").result()
`;
}

export function teach(element, model) {
  const mark = `${model} ${key() === null}`;
  if (element.dataset.mark === mark) return;
  element.dataset.mark = mark;
  element.replaceChildren(
    h(
      "p",
      { class: "lede" },
      "No runs yet. A run appears here as soon as a program starts to train, and its loss is plotted meanwhile. ",
      h("a", { href: "#/runs?archived=all" }, "Show archived runs"),
    ),
    h(
      "div",
      { class: "card" },
      h("h2", {}, "See a model learn"),
      h("p", {}, "In a terminal on this machine. It trains for a minute or two and shows the model before and after."),
      code("tinkex demo", "the demo's command"),
    ),
    h(
      "div",
      { class: "card" },
      h("h2", {}, "Train on this service"),
      h(
        "p",
        {},
        "Ten lines of Python",
        key() === null
          ? "."
          : ["; the key is taken from the environment variable ", h("code", {}, "TINKER_API_KEY"), "."],
      ),
      code(tenLines(serviceUrl(), model), "ten lines of Python"),
    ),
  );
}
