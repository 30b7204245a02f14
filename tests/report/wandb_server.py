"""A W&B server of one project, as far as `wandb.Api` asks to list and download artifacts: GraphQL by the query's name,
and files by their address. Everything on this side of the HTTP request is wandb itself.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote

INFO = {"id": "p", "internalId": "1", "name": "papers", "entity": {"name": "lab"}}
NO_MORE = {"__typename": "PageInfo", "endCursor": None, "hasNextPage": False}
TIME = "2026-01-01T00:00:00Z"


@dataclass
class Project:
    """lab/papers and the artifacts in it: (name, version) -> metadata and files."""

    artifacts: dict[tuple[str, str], tuple[dict[str, Any], list[Path]]] = field(default_factory=dict)
    contents: dict[str, bytes] = field(default_factory=dict)  # by address: changed here, changed on the way
    status: int = 200
    asked: list[str] = field(default_factory=list)
    url: str = ""

    def log(self, name: str, files: list[Path], version: str = "v0", **metadata: Any) -> None:
        self.artifacts[name, version] = (metadata, files)
        for file in files:
            self.contents[f"/files/{name}/{version}/{file.name}"] = file.read_bytes()
        self.contents[f"/manifests/{name}/{version}"] = json.dumps(manifest_of(files)).encode()

    def answer(self, query: str, given: dict[str, Any]) -> Any:
        name = re.search(r"(?:query|mutation)\s+(\w+)", query)
        assert name is not None, query
        self.asked.append(name[1])
        ours = (given.get("entity"), given.get("project")) == ("lab", "papers")
        answers: dict[str, Callable[[dict[str, Any]], Any]] = {
            "Viewer": lambda _: {"viewer": {"id": "u", "entity": "lab", "username": "u", "teams": {"edges": []}}},
            "GetDefaultEntity": lambda _: {"viewer": {"id": "u", "entity": "lab"}},
            "ServerFeaturesQuery": lambda _: {"serverInfo": {"features": []}},
            "ProjectArtifactTypes": lambda given: {"project": self._types() if ours else None},
            "ArtifactTypeArtifactCollections": lambda given: {"project": {"artifactType": self._collections(given)}},
            "ArtifactMembershipByName": lambda given: {"project": {"artifactCollectionMembership": self._one(given)}},
            "FetchArtifactManifest": lambda given: {
                "artifact": {"currentManifest": {"file": {"directUrl": f"{self.url}/manifests/{given['id']}"}}}
            },
            "GetArtifactMembershipFileUrls": lambda given: {"project": {"artifactCollection": self._files(given)}},
        }
        return answers[name[1]](given)

    def _types(self) -> Any:
        kinds = sorted({name.partition("-")[0] for name, _ in self.artifacts})
        return {"artifactTypes": page([kind_node(kind) for kind in kinds])}

    def _collections(self, given: dict[str, Any]) -> Any:
        names = sorted({name for name, _ in self.artifacts if name.startswith(given["type"])}, reverse=True)
        nodes = [
            {
                **{"__typename": "ArtifactSequence", "id": name, "name": name, "description": None},
                **{"createdAt": TIME, "updatedAt": TIME, "project": INFO, "tags": page([])},
                "type": {"name": given["type"]},
            }
            for name in names
        ]
        return {"artifactCollections": {**page(nodes), "totalCount": len(nodes)}}

    def _one(self, given: dict[str, Any]) -> Any:
        name, _, alias = given["name"].partition(":")
        versions = sorted(version for known, version in self.artifacts if known == name)
        version = versions[-1] if alias == "latest" and versions else alias
        if (name, version) not in self.artifacts:
            return None
        metadata, files = self.artifacts[name, version]
        collection = {"__typename": "ArtifactSequence", "name": name, "project": INFO}
        digest = hashlib.md5(json.dumps(manifest_of(files)).encode()).hexdigest()
        artifact = {
            **{"__typename": "Artifact", "id": f"{name}/{version}", "artifactSequence": collection},
            **{"versionIndex": int(version[1:]), "artifactType": {"name": name.partition("-")[0]}, "tags": []},
            **{"description": None, "metadata": json.dumps(metadata), "ttlDurationSeconds": 0, "ttlIsInherited": False},
            **{"historyStep": None, "state": "COMMITTED", "size": sum(file.stat().st_size for file in files)},
            **{"digest": digest, "digestAlgorithm": "MANIFEST_MD5", "commitHash": None, "fileCount": len(files)},
            **{"createdAt": TIME, "updatedAt": TIME, "aliases": []},
        }
        return {
            **{"__typename": "ArtifactCollectionMembership", "id": f"{name}/{version}", "createdAt": TIME},
            **{"versionIndex": int(version[1:]), "aliases": [], "artifactCollection": collection, "artifact": artifact},
        }

    def _files(self, given: dict[str, Any]) -> Any:
        name, version = given["collection"], given["alias"]
        _, files = self.artifacts[name, version]
        urls = [(file.name, f"{self.url}/files/{name}/{version}/{file.name}") for file in files]
        nodes = [{"__typename": "File", "name": name, "directUrl": url} for name, url in urls]
        return {"__typename": "ArtifactSequence", "artifactMembership": {"files": page(nodes)}}


def page(nodes: list[Any]) -> dict[str, Any]:
    return {"edges": [{"node": node} for node in nodes], "pageInfo": NO_MORE}


def kind_node(kind: str) -> dict[str, Any]:
    return {"__typename": "ArtifactType", "id": kind, "name": kind, "description": None, "createdAt": TIME}


def manifest_of(files: list[Path]) -> dict[str, Any]:
    def entry(file: Path) -> dict[str, Any]:
        digest = base64.b64encode(hashlib.md5(file.read_bytes()).digest()).decode()
        return {"digest": digest, "size": file.stat().st_size}

    return {
        **{"version": 1, "storagePolicy": "wandb-storage-policy-v1", "storagePolicyConfig": {"storageLayout": "V2"}},
        "contents": {file.name: entry(file) for file in files},
    }


@contextmanager
def wandb_server() -> Iterator[Project]:
    project = Project()

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *args: object) -> None:
            pass

        def do_GET(self) -> None:
            content = project.contents.get(unquote(self.path))
            self._reply(404 if content is None and self.path != "/" else 200, content or b"")

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            if self.path != "/graphql":
                return self._reply(404, b"")
            asked = json.loads(body)
            if project.status != 200:
                return self._reply(project.status, b'{"errors": [{"message": "not today"}]}')
            data = project.answer(asked["query"], asked.get("variables") or {})
            return self._reply(200, json.dumps({"data": data}).encode())

        def _reply(self, status: int, content: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    project.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield project
    finally:
        server.shutdown()
        server.server_close()
