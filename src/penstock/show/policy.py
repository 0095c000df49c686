"""The report page's content security policy: what the browser runs and loads is what this page brought, and nothing else.

Scripts run by the digest of their text, style sheets apply by a nonce that is drawn for each page (Bokeh makes some at run
time). Nothing is asked of the network, no text becomes code (no ``eval``), and neither attributes nor forms do anything. So
text from a trace or a config that got past the escaping would still be no more than text.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable


def policy(scripts: Iterable[str], nonce: str) -> str:
    """The policy as the ``meta`` element that has to stand before all it applies to.

    Args:
        scripts: the texts of the page's script elements.
        nonce: of its style elements.
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
    return f'<meta http-equiv="Content-Security-Policy" content="{"; ".join(rules)}">'


def _digest(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
