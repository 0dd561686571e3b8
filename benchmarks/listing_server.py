"""A loopback server that answers S3 listings, slowly: ListObjectsV2 of one bucket, nothing else."""

from __future__ import annotations

import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from urllib.parse import parse_qs, urlsplit

PAGE = 1000
"""Keys of one answer, as S3 gives them."""


class ListingServer:
    """``with ListingServer(num_keys, latency_seconds) as endpoint_url``."""

    def __init__(self, num_keys: int, latency_seconds: float) -> None:
        self.num_keys, self.latency_seconds = num_keys, latency_seconds
        self.num_requests = 0
        owner = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                owner.num_requests += 1
                time.sleep(owner.latency_seconds)
                query = parse_qs(urlsplit(self.path).query)
                body = owner.page(int(query.get("continuation-token", ["0"])[0])).encode()
                self.send_response(200)
                self.send_header("Content-Type", "application/xml")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                return

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)

    def page(self, start: int) -> str:
        """The answer that begins with key ``start``."""
        stop = min(start + PAGE, self.num_keys)
        entries = "".join(
            f"<Contents><Key>ledger/train/{index:06d}.json</Key><Size>1000</Size>"
            "<LastModified>2026-01-01T00:00:00.000Z</LastModified><ETag>e</ETag>"
            "<StorageClass>STANDARD</StorageClass></Contents>"
            for index in range(start, stop)
        )
        more = stop < self.num_keys
        token = f"<NextContinuationToken>{stop}</NextContinuationToken>" if more else ""
        return (
            '<?xml version="1.0"?><ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">'
            f"<Name>bucket</Name><KeyCount>{stop - start}</KeyCount><MaxKeys>{PAGE}</MaxKeys>"
            f"<IsTruncated>{'true' if more else 'false'}</IsTruncated>{token}{entries}"
            "</ListBucketResult>"
        )

    def __enter__(self) -> str:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
