"""task_cards: a task's best units as rows for the template, tokens with how strongly they are coloured.

1. Cards are grouped by task, in the order of the run.
2. Within a card all contexts share one colour scale: a token's strength is |z| over the card's largest |z|.
3. Promoted and suppressed tokens share one bar scale per card.
"""

from typing import Any

from swd_lens.analysis.audit import Context, LogitEffect
from swd_lens.report.wording import running_token, signed
from swd_lens.study import Run
from swd_lens.study.cards import UnitCard

FAINT = 0.08  # below this share of the largest |z| a colour could not be told from none


def task_cards(run: Run) -> list[dict[str, Any]]:
    """One entry per task that has cards: its name and its units."""
    by_task: dict[str, list[UnitCard]] = {}
    for card in run.cards:
        by_task.setdefault(card.task, []).append(card)
    return [{"task": task, "cards": [_card(card) for card in cards]} for task, cards in by_task.items()]


def _card(card: UnitCard) -> dict[str, Any]:
    largest = max((abs(z) for context in card.contexts for z in context.z), default=0.0)
    return {
        "card": card,
        "largest": largest,
        "contexts": [_context(context, largest) for context in card.contexts],
        "effects": None if card.logits is None else _effects(card.logits),
    }


def _context(context: Context, largest: float) -> dict[str, Any]:
    tokens = []
    for i, (text, z) in enumerate(zip(context.tokens, context.z, strict=True)):
        lead, word = running_token(text)
        strength = abs(z) / largest if largest > 0 else 0.0
        tokens.append(
            {
                "lead": lead if tokens else "",
                "text": word,
                "sign": "" if strength < FAINT else "p" if z > 0 else "n",
                "strength": f"{strength:.2f}",
                "z": signed(z, 2),
                "peak": i == context.peak,
            }
        )
    return {"tokens": tokens, "z": signed(context.z[context.peak], 2)}


def _effects(effect: LogitEffect) -> list[dict[str, Any]]:
    largest = max((abs(v) for _, v in (*effect.promoted, *effect.suppressed)), default=0.0) or 1.0
    return [
        {
            "name": name,
            "sign": sign,
            "tokens": [{"text": t, "value": signed(v, 3), "width": f"{100 * abs(v) / largest:.0f}"} for t, v in tokens],
        }
        for name, sign, tokens in (("promotes", "p", effect.promoted), ("suppresses", "n", effect.suppressed))
    ]
