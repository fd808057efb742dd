"""The files of the chat page, and the content security policy that the browser applies to them."""

from pathlib import Path

from jaxattn.server.http.request import HttpRequest

PAGE = Path(__file__).with_name("page")
PREFIX = "/page/"
TYPES = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
# The page loads nothing from elsewhere. With trusted types, the browser rejects text as markup.
POLICY = "; ".join(
    (
        "default-src 'none'",
        "connect-src 'self'",
        "img-src 'self'",
        "script-src 'self'",
        "style-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
HEADERS = {
    "content-security-policy": POLICY,
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "cache-control": "no-cache",
}


def page_files() -> dict[str, Path]:
    """Returns the page's files by request path."""
    files = sorted(path for path in PAGE.rglob("*") if path.suffix in TYPES)
    found = {PREFIX + path.relative_to(PAGE).as_posix(): path for path in files}
    return {"/": found.pop(PREFIX + "index.html"), **found}


async def page_file(path: Path, exchange: HttpRequest) -> None:
    """Sends one of `page_files`."""
    await exchange.whole(path.read_bytes(), 200, {"content-type": TYPES[path.suffix], **HEADERS})
