(function () {
  "use strict";
  const root = document.currentScript.closest(".rollouts");
  const find = (selector) => root.querySelector(selector);
  const data = JSON.parse(find("script.data").textContent);
  const form = find("form.tools");
  const fields = form.elements;
  const { make, short, figures, prepare, episode, episodeFacts, aboutToken } = root.rollouts;
  const FIRST_CARDS = 24;
  const gap = (row, i) => minus(at(row.old_log_probs, i), at(row.rollout_log_probs, i));
  // What tokens can be coloured by: a value, and what it means.
  // Tokens that an environment wrote have none.
  const own = (value) => (row, i) => row.sampled && !row.sampled[i] ? null : value(row, i);
  const COLOURS = {
    advantage: ["advantage", own((row, i) => at(row.advantages, i)), "blue: made likelier"],
    gap: ["trainer − rollout log-prob", own(gap), "log-prob by the trainer less that of sampling"],
    reference: [
      "policy − reference log-prob",
      own((row, i) => minus(policy(row, i), at(row.ref_log_probs, i))),
      "log-prob by the policy less that of the frozen reference",
    ],
    surprise: ["log-prob", own(policy), "orange: unlikely tokens"],
    value: ["critic's value", own((row, i) => at(row.values, i)), "expected return from here"],
    none: ["nothing", () => null, ""],
  };

  function at(values, i) {
    return Array.isArray(values) ? values[i] : values;
  }

  function minus(a, b) {
    return typeof a === "number" && typeof b === "number" ? a - b : null;
  }

  function policy(row, i) {
    const own = at(row.old_log_probs, i);
    return typeof own === "number" ? own : at(row.rollout_log_probs, i);
  }

  function mean(values) {
    const known = values.filter((value) => typeof value === "number");
    return known.length ? known.reduce((a, b) => a + b, 0) / known.length : null;
  }

  function key(sample) {
    return `${sample.split} ${sample.step}`;
  }

  function sampleOf(name) {
    return data.samples.find((sample) => key(sample) === name);
  }

  function drawCurves() {
    const marks = chosen().map((sample) => sample.step);
    const choose = (name) => {
      state.curve = name;
      drawCurves();
      remember();
    };
    find(".curves").replaceChildren(...figures(data.curves, marks, data.model, state.curve, choose));
  }

  function chosen() {
    return [sampleOf(fields.step.value), sampleOf(fields.other.value)].filter(Boolean);
  }

  function matches(sample, row) {
    const low = parseFloat(fields.low.value);
    const high = parseFloat(fields.high.value);
    const words = fields.text.value.toLowerCase();
    if ((row.reward === null || row.reward < low) && !Number.isNaN(low)) {
      return false;
    }
    if ((row.reward === null || row.reward > high) && !Number.isNaN(high)) {
      return false;
    }
    const text = () => row.tokens.map((token) => sample.vocabulary[token]).join("");
    return !words || `${sample.prompts[row.prompt]}\n${text()}`.toLowerCase().includes(words);
  }

  // Of two steps, prompts that both have come first.
  function ordered(sample, others) {
    const common = new Set(others.flatMap((other) => other.prompts));
    const text = (row) => sample.prompts[row.prompt];
    const place = (row) => (common.has(text(row)) ? 0 : 1);
    const compare = (a, b) => (a < b ? -1 : a > b ? 1 : 0);
    const by = {
      group: (a, b) =>
        place(a) - place(b) ||
        (place(a) ? 0 : compare(text(a), text(b))) ||
        a.prompt - b.prompt ||
        a.group - b.group,
      high: (a, b) => b.reward - a.reward,
      low: (a, b) => a.reward - b.reward,
      long: (a, b) => b.length - a.length,
    };
    return sample.rows.filter((row) => matches(sample, row)).sort(by[fields.order.value]);
  }

  // The value that gets the full colour: the largest but for outliers.
  function fullScale(samples, value) {
    const sizes = samples.flatMap((sample) =>
      sample.rows.flatMap((row) => row.tokens.map((_, i) => value(row, i))),
    );
    const known = sizes.filter((one) => typeof one === "number").map(Math.abs);
    known.sort((a, b) => a - b);
    return known.length ? known[Math.floor(0.98 * (known.length - 1))] : 0;
  }

  function badges(row) {
    const box = make("div", "badges");
    const add = (text, className) => box.append(make("span", className || "", text));
    const verdict = row.correct === true ? "good" : row.correct === false ? "bad" : "";
    add(`reward ${short(row.reward)}`, `reward ${verdict}`);
    Object.entries(row.parts).forEach(([name, value]) => add(`${name} ${short(value)}`));
    if (row.shaped !== null && Math.abs(row.shaped - row.reward) > 1e-6) {
      add(`shaped ${short(row.shaped)}`);
    }
    const sampled = (_, i) => !row.sampled || row.sampled[i];
    const every = row.advantages;
    const advantage = Array.isArray(every) ? mean(every.filter(sampled)) : every;
    if (advantage !== null) {
      add(`advantage ${short(advantage)}`);
    }
    add(`${row.length} tokens`);
    if (row.versions) {
      const versions = [...new Set(row.versions.map(([, version]) => version))];
      add(`policy versions ${versions.join(", ")}`);
    }
    if (row.turns) {
      episodeFacts(row).forEach(([text, className]) => add(text, className));
    }
    if (row.truncated) {
      add("cut at the limit", "bad");
    }
    if (row.error) {
      add(`reward failed: ${row.error}`, "bad");
    }
    return box;
  }

  // The tokens from `from` to `to`, as far as the page has them.
  function answer(sample, row, value, full, from, to) {
    const box = make("div", "answer");
    row.tokens.slice(from, to).forEach((token, place) => {
      const text = sample.vocabulary[token];
      if (!text) {
        return; // the rest of a character that stands before
      }
      const i = from + place;
      const left = row.sampled && row.sampled[i] && !row.trained[i];
      const span = make("span", left ? "untrained" : "", text.replace(/\n/g, "↵\n"));
      const size = value(row, i);
      if (typeof size === "number" && full > 0) {
        const strength = Math.min(1, Math.abs(size) / full) * 0.55;
        const side = size < 0 ? "--minus" : "--plus";
        span.style.backgroundColor = `rgba(var(${side}), ${strength.toFixed(3)})`;
      }
      span.dataset.token = i;
      box.append(span);
    });
    const hidden = to - Math.max(from, row.tokens.length);
    if (hidden > 0) {
      const more = `… ${hidden} more tokens in the Parquet file`;
      box.append(make("em", "soft", more));
    }
    box.addEventListener("click", (event) => {
      const span = event.target.closest("span");
      if (span) {
        inspect(sample, row, span);
      }
    });
    return box;
  }

  // The values of one token, at the foot of the page: a phone has no pointer that hovers.
  function inspect(sample, row, span) {
    const i = Number(span.dataset.token);
    root.querySelectorAll(".chosen").forEach((one) => one.classList.remove("chosen"));
    span.classList.add("chosen");
    const facts = [`token ${i + 1}: ${JSON.stringify(sample.vocabulary[row.tokens[i]])}`];
    const foreign = row.sampled && !row.sampled[i];
    const add = (name, value) => {
      if (typeof value === "number" && !foreign) {
        facts.push(`${name} ${short(value)}`);
      }
    };
    add("advantage", at(row.advantages, i));
    add("log-prob when sampled", at(row.rollout_log_probs, i));
    add("by the trainer", at(row.old_log_probs, i));
    add("gap", gap(row, i));
    add("by the reference", at(row.ref_log_probs, i));
    add("value", at(row.values, i));
    facts.push(...aboutToken(row, i));
    const foot = find("p.token");
    foot.textContent = facts.join(" · ");
    foot.hidden = false;
  }

  function card(sample, row, before, value, full) {
    const same = before && before.prompt === row.prompt && before.group === row.group;
    const box = make("article", same ? "card same" : "card");
    if (!same) {
      box.append(make("div", "prompt", sample.prompts[row.prompt]));
      const facts = [row.truth && `answer: ${row.truth}`, row.source].filter(Boolean);
      if (facts.length) {
        box.append(make("p", "soft", facts.join(" · ")));
      }
    }
    const tokens = (from, to) => answer(sample, row, value, full, from, to);
    box.append(row.turns ? episode(row, tokens) : tokens(0, row.length), badges(row));
    return box;
  }

  function summary(sample, rows) {
    const share = (values) => `${Math.round(100 * mean(values.map(Number)))} %`;
    const facts = [`${rows.length} of ${sample.rows.length} completions of the sample`];
    if (rows.length) {
      facts.push(`reward ${short(mean(rows.map((row) => row.reward)))}`);
      Object.keys(rows[0].parts).forEach((name) =>
        facts.push(`${name} ${short(mean(rows.map((row) => row.parts[name])))}`),
      );
      if (rows.every((row) => row.correct !== null)) {
        facts.push(`right ${share(rows.map((row) => row.correct))}`);
      }
      facts.push(`${short(mean(rows.map((row) => row.length)))} tokens`);
      facts.push(`cut ${share(rows.map((row) => row.truncated))}`);
    }
    return make("p", "facts soft", facts.join(" · "));
  }

  function column(sample, others, value, full) {
    const box = make("section", "step");
    const rows = ordered(sample, others);
    const split = sample.split === "validation" ? ", validation (greedy)" : "";
    const model = sample.step === data.model ? ", the model's step" : "";
    box.append(make("h2", "", `Step ${sample.step}${split}${model}`), summary(sample, rows));
    const show = (from, to) => {
      rows.slice(from, to).forEach((row, i) => {
        box.append(card(sample, row, rows[from + i - 1], value, full));
      });
      if (to < rows.length) {
        const more = make("button", "", `show ${rows.length - to} more`);
        more.type = "button";
        more.addEventListener("click", () => {
          more.remove();
          show(to, rows.length);
        });
        box.append(more);
      }
    };
    show(0, FIRST_CARDS);
    return box;
  }

  function draw() {
    const samples = chosen();
    const [, value, meaning] = COLOURS[fields.colour.value];
    const full = fullScale(samples, value);
    const steps = find(".steps");
    steps.classList.toggle("two", samples.length > 1);
    steps.replaceChildren(
      ...samples.map((sample) =>
        column(sample, samples.filter((other) => other !== sample), value, full),
      ),
    );
    const legend = find(".legend");
    legend.hidden = fields.colour.value === "none";
    find(".legend .low").textContent = short(-full);
    find(".legend .high").textContent = short(full);
    find(".legend .meaning").textContent = full > 0 ? meaning : `${meaning}; it is 0 everywhere`;
    find("p.token").hidden = true;
    drawCurves();
    remember();
  }

  // The choice is kept in the address, so that a page that was written again shows the same.
  function remember() {
    const kept = new URLSearchParams(new FormData(form));
    kept.set("curve", state.curve || "");
    try {
      history.replaceState(null, "", `#${kept}`);
    } catch (error) {
      state.frame = true; // a frame without an address of its own, as in a Deck
    }
  }

  function recall() {
    const kept = new URLSearchParams(location.hash.slice(1));
    kept.forEach((value, name) => {
      const field = fields[name];
      const known = field && (!field.options || [...field.options].some((o) => o.value === value));
      if (known) {
        field.value = value;
      }
    });
    state.curve = kept.get("curve");
  }

  const state = { curve: "" };
  const about = data.leftOut ? ` · ${data.leftOut} samples between these are in Parquet only` : "";
  const model = data.model === null ? "" : ` · ○ the model is that of step ${data.model}`;
  find(".about").textContent = model + about;
  if (!data.samples.length) {
    drawCurves();
    find(".steps").append(make("p", "banner", "There is no sample yet."));
    return;
  }
  data.samples.forEach((sample) => sample.rows.forEach(prepare));
  const names = data.samples.map(key);
  const title = (name) =>
    name.replace("train ", "").replace(/^validation (.*)/, "$1 (validation)") +
    (sampleOf(name).step === data.model ? " ○" : "");
  names.forEach((name) => fields.step.append(new Option(title(name), name)));
  fields.other.append(new Option("–", ""));
  names.forEach((name) => fields.other.append(new Option(title(name), name)));
  const trained = data.samples.filter((sample) => sample.split === "train");
  fields.step.value = key((trained.length ? trained : data.samples).at(-1));
  Object.entries(COLOURS).forEach(([name, [words, value]]) => {
    const known = data.samples.some((sample) =>
      sample.rows.some((row) => row.tokens.some((_, i) => typeof value(row, i) === "number")),
    );
    const option = new Option(known || name === "none" ? words : `${words} (not computed)`, name);
    option.disabled = !known && name !== "none";
    fields.colour.append(option);
  });
  fields.colour.value = [...fields.colour.options].find((option) => !option.disabled).value;
  recall();
  form.hidden = false;
  form.addEventListener("submit", (event) => event.preventDefault());
  form.addEventListener("input", draw);
  form.addEventListener("click", (event) => {
    const button = event.target.closest("button[data-move]");
    if (button) {
      const split = fields.step.value.split(" ")[0];
      const same = names.filter((name) => name.startsWith(split));
      const to = same.indexOf(fields.step.value) + Number(button.dataset.move);
      fields.step.value = same[Math.max(0, Math.min(same.length - 1, to))];
      draw();
    }
  });
  draw();
})();
