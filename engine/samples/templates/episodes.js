(function () {
  "use strict";
  // Rows of episodes: turns, what their calls were read as, and what the environment wrote between.
  const root = document.currentScript.closest(".rollouts");
  const { make, short } = root.rollouts;
  const FOLDED = 6; // turns; of more, those between the first two and the last two are folded
  const MOST_INFO = 8;

  // Whether the policy sampled a token, and whether that is learned from.
  function prepare(row) {
    if (!row.turns) {
      return;
    }
    row.sampled = new Uint8Array(row.tokens.length);
    row.trained = new Uint8Array(row.tokens.length);
    row.turns.forEach((turn) => {
      row.sampled.fill(1, turn.start, turn.stop);
      row.trained.fill(1, turn.start, turn.stop);
      turn.untrained.forEach((i) => (row.trained[i] = 0));
    });
  }

  function learned(turn) {
    const [all, left] = [turn.stop - turn.start, turn.untrained.length];
    if (!left) {
      return "trained";
    }
    return left === all ? "not trained" : `${all - left} tokens trained`;
  }

  function count(number, noun) {
    return `${number} ${noun}${number === 1 ? "" : "s"}`;
  }

  function head(facts) {
    return make("p", "head", facts.join(" · "));
  }

  function calls(turn) {
    const list = make("ul", "calls");
    turn.calls.forEach(([name, given]) => {
      const item = make("li", "", "call ");
      item.append(make("b", "", name), make("code", "", given));
      list.append(item);
    });
    turn.malformed.forEach((sentence) => {
      list.append(make("li", "bad", `malformed: ${sentence}`));
    });
    return list;
  }

  // A turn of the policy, and after it what it reads before the next one.
  function turnOf(row, k, tokens) {
    const turn = row.turns[k];
    const end = k + 1 < row.turns.length ? row.turns[k + 1].start : row.length;
    const box = make("section", "turn");
    const facts = [
      `turn ${row.firstTurn + k + 1}`,
      count(turn.stop - turn.start, "token"),
      learned(turn),
      `reward ${short(turn.reward)}`,
    ];
    box.append(head(facts), tokens(turn.start, turn.stop));
    if (turn.calls.length || turn.malformed.length) {
      box.append(calls(turn));
    }
    if (end > turn.stop) {
      const observed = make("section", "observed");
      const told = ["environment", count(end - turn.stop, "token"), "not trained"];
      observed.append(head(told), tokens(turn.stop, end));
      box.append(observed);
    }
    return box;
  }

  // `tokens(from, to)` makes an element of some of the row's tokens.
  function episode(row, tokens) {
    const box = make("div", "episode");
    const show = (from, to, target) => {
      for (let k = from; k < to; k += 1) {
        target.append(turnOf(row, k, tokens));
      }
    };
    const all = row.turns.length;
    if (all <= FOLDED) {
      show(0, all, box);
      return box;
    }
    show(0, 2, box);
    const fold = make("details", "fold");
    const rewards = row.turns.slice(2, all - 2).reduce((sum, turn) => sum + turn.reward, 0);
    const named = `turns ${row.firstTurn + 3} to ${row.firstTurn + all - 2}`;
    fold.append(make("summary", "", `${named} · reward ${short(rewards)}`));
    fold.addEventListener("toggle", () => {
      if (fold.children.length === 1) {
        show(2, all - 2, fold);
      }
    });
    box.append(fold);
    show(all - 2, all, box);
    return box;
  }

  // What stands below an episode: [text, class] each.
  function facts(row) {
    const own = row.turns.reduce((sum, turn) => sum + turn.reward, 0);
    const [first, last] = [row.firstTurn + 1, row.firstTurn + row.turns.length];
    const whole = row.turns.length === row.allTurns;
    const found = [
      [whole ? count(row.allTurns, "turn") : `turns ${first} to ${last} of ${row.allTurns}`],
      [`ended: ${row.end}`, row.end === "failed" ? "bad" : ""],
      [`by turns ${short(own)}`],
      [`outcome ${short(row.reward === null ? null : row.reward - own)}`],
    ];
    if (!whole) {
      found.push([`episode's rewards by turns ${short(row.given)}`]);
    }
    if (row.fault) {
      found.push([row.fault, "bad"]);
    }
    found.push(...information(row.info), [`waited ${short(row.seconds)} s`]);
    return found;
  }

  function information(text) {
    let info = {};
    try {
      info = JSON.parse(text) || {};
    } catch (error) {
      info = { info: text }; // it was cut
    }
    return Object.entries(info)
      .slice(0, MOST_INFO)
      .map(([name, value]) => {
        const shown = typeof value === "number" ? short(value) : JSON.stringify(value);
        return [`${name} ${shown.slice(0, 80)}`];
      });
  }

  // Of a token at the foot of the page: whose it is, and by which policy.
  function about(row, i) {
    const found = [];
    if (row.sampled) {
      const whose = row.sampled[i] ? "sampled" : "environment's";
      found.push(`${whose}, ${row.trained[i] ? "trained" : "not trained"}`);
    }
    if (row.versions && (!row.sampled || row.sampled[i])) {
      found.push(`policy version ${row.versions.findLast(([from]) => from <= i)[1]}`);
    }
    return found;
  }

  Object.assign(root.rollouts, { prepare, episode, episodeFacts: facts, aboutToken: about });
})();
