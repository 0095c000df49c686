"""The report page's content security policy: the browser runs and loads nothing but what the page brought itself.

Scripts run by the digest of their text. Style sheets apply by a nonce that is drawn for each page, since Bokeh makes some
at run time. The network is never asked for anything, no text becomes code (no ``eval``), and neither attributes nor forms do
anything. So even text from a trace or a config that got past the escaping would remain text.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable


def policy(scripts: Iterable[str], nonce: str) -> str:
    """Return the policy for a ``meta`` element, which must come before everything it applies to.

    Args:
        nonce: random text that the page's style elements carry.
    """
    digests = " ".join(dict.fromkeys(f"'sha256-{_digest(script)}'" for script in scripts))
    rules = (
        "default-src 'none'",
        f"script-src {digests}",
        f"style-src 'nonce-{nonce}'",
        "img-src data: blob:",  # Bokeh's icons, and what its save tool makes
        "base-uri 'none'",
        "form-action 'none'",
    )
    return "; ".join(rules)


def _digest(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
