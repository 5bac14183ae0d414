"""Links from a page to a file outside docs/, such as `../src/fedlm/run.py`.

On the code host such a link opens the file. The site holds no source files. So here the link leads
to `repo_url` (if mkdocs.yml names one); otherwise its text stays and the link goes. A link to
a file that does not exist is a warning, which stops a strict build.
"""

import logging
import re
from pathlib import Path

log = logging.getLogger("mkdocs.hooks.repository_links")
LINK = re.compile(r"\[(?P<text>[^\[\]]+)\]\((?P<target>\.\./[^()\s#]+)(?P<anchor>#[^()\s]*)?\)")


def on_page_markdown(markdown, *, page, config, files):
    """Replace the links of one page that leave docs/."""
    docs = Path(config.docs_dir).resolve()
    repository = Path(config.config_file_path).resolve().parent
    folder = (docs / page.file.src_uri).parent

    def replace(link):
        path = (folder / link["target"]).resolve()
        if path.is_relative_to(docs):
            return link[0]
        if not path.is_relative_to(repository) or not path.exists():
            log.warning("%s links to %s, which does not exist", page.file.src_uri, link["target"])
            return link["text"]
        if not config.repo_url:
            return link["text"]
        kind = "tree" if path.is_dir() else "blob"
        place = path.relative_to(repository).as_posix()
        base = config.repo_url.rstrip("/")
        return f"[{link['text']}]({base}/{kind}/main/{place}{link['anchor'] or ''})"

    return LINK.sub(replace, markdown)
