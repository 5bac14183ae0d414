"""The bill of materials of a release, and its dependencies with their hashes.

    pip install --dry-run --ignore-installed --report report.json -c constraints.txt .
    python release/sbom.py report.json dist/

In:       the report of pip on what it would install.
Out:      `sbom.cdx.json` (CycloneDX 1.5), and `requirements.lock` for `pip --require-hashes`.
Promise:  every dependency has the hash of the archive that was chosen; where it came from is not
          written down, because a mirror's address is nobody's business.
Not here: which versions are chosen (`constraints.txt`).
"""

from __future__ import annotations

import json
import sys
import uuid
from pathlib import Path
from typing import Any


def dependencies(report: dict[str, Any]) -> list[dict[str, str]]:
    """Return name, version, licence and hash of each distribution that pip would fetch."""
    found = []
    for item in report["install"]:
        told, hashes = item["metadata"], item["download_info"].get("archive_info", {})
        digest = (hashes.get("hashes") or {}).get("sha256", "")
        if "dir_info" in item["download_info"]:
            continue  # fedlm itself, from its folder
        if not digest:
            raise SystemExit(f"{told['name']} {told['version']}: pip gives no hash of it.")
        licence = told.get("license_expression") or told.get("license") or ""
        one_line = licence if "\n" not in licence and len(licence) < 80 else ""
        found.append(
            {
                "name": told["name"].lower().replace("_", "-"),
                "version": told["version"],
                "licence": one_line,
                "sha256": digest,
            }
        )
    return sorted(found, key=lambda each: each["name"])


def bill(found: list[dict[str, str]], version: str) -> dict[str, Any]:
    """Return a CycloneDX document."""
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "serialNumber": f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_OID, json.dumps(found))}",
        "version": 1,
        "metadata": {
            "component": {"type": "library", "name": "fedlm", "version": version},
        },
        "components": [
            {
                "type": "library",
                "name": each["name"],
                "version": each["version"],
                "purl": f"pkg:pypi/{each['name']}@{each['version']}",
                "hashes": [{"alg": "SHA-256", "content": each["sha256"]}],
                **(
                    {"licenses": [{"license": {"name": each["licence"]}}]}
                    if each["licence"]
                    else {}
                ),
            }
            for each in found
        ],
    }


def lock(found: list[dict[str, str]]) -> str:
    """Return the dependencies as a requirements file with hashes."""
    return "".join(f"{e['name']}=={e['version']} --hash=sha256:{e['sha256']}\n" for e in found)


def main() -> None:
    """Write both files."""
    report = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    out = Path(sys.argv[2])
    out.mkdir(parents=True, exist_ok=True)
    own = [i["metadata"] for i in report["install"] if i["metadata"]["name"] == "fedlm"]
    found = dependencies(report)
    text = json.dumps(bill(found, own[0]["version"]), indent=2) + "\n"
    (out / "sbom.cdx.json").write_text(text, encoding="utf-8")
    (out / "requirements.lock").write_text(lock(found), encoding="utf-8")
    print(f"{len(found)} dependencies: {out / 'sbom.cdx.json'}, {out / 'requirements.lock'}")


if __name__ == "__main__":
    main()
