"""HTTP to an OpenAI-compatible API: retries within a deadline, and errors as Orchard's."""

from __future__ import annotations

import asyncio
import email.utils
import io
import json
import random
import re
import time
from collections.abc import Mapping
from typing import Any, NoReturn

import aiohttp

from orchard_api.errors import ContextOverflowError, DeadlineError, OverloadedError, PolicyServerError
from orchard_api.openai_address import ApiOptions, is_loopback

_BODY_LIMIT = 64 << 20
_RETRIED = frozenset({408, 409, 425, 429, 500, 502, 503, 504, 529})
_OVERFLOW = re.compile(
    r"context[_ ]length|context window|maximum context|prompt is too long|too many tokens|input is too long"
    r"|longer than the maximum model length|exceeds? the (model's )?max",
    re.IGNORECASE,
)
_LIMIT = re.compile(r"(?:maximum (?:context|model) length|context window|max(?:imum)?)\D{0,30}?(\d{2,})", re.IGNORECASE)
_PROMPT = re.compile(
    r"(?:resulted in|requested|has|have|got|prompt \(|input \()\D{0,20}?(\d{2,})|(\d{2,})\s*(?:input )?tokens >",
    re.IGNORECASE,
)


class ApiRefusalError(PolicyServerError):
    """The API answered a request with an error that a retry does not mend.

    Attributes:
        status: the HTTP status.
        parameter: the request field that it names, or empty.
    """

    def __init__(self, message: str, *, status: int, parameter: str = "", hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.status = status
        self.parameter = parameter


class ApiClient:
    """A connection pool to one API. The key is in no message, repr or record.

    Args:
        url: the API's root, as `normalise_base_url` gives it.
        key: the bearer token, or None.
        slots: limits the requests under way, where several clients share a limit.
    """

    def __init__(
        self, options: ApiOptions, *, url: str, key: str | None, slots: asyncio.Semaphore | None = None
    ) -> None:
        self.base_url = url
        self._key = key
        self._key_name = options.api_key_env
        self._timeout_s = options.timeout_s
        self._retries = options.max_retries
        self._slots = slots or asyncio.Semaphore(options.max_concurrency)
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=options.max_concurrency),
            headers={"Authorization": f"Bearer {key}"} if key else {},
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=options.connect_timeout_s),
            trust_env=not is_loopback(url),
        )

    def __repr__(self) -> str:
        return f"ApiClient({self.base_url!r})"

    async def get(self, path: str, *, deadline_s: float) -> Any:
        """GET, tried once; see `post`."""
        return await self._within(deadline_s, self._attempt("GET", path, None))

    async def post(self, path: str, body: Mapping[str, Any], *, deadline_s: float) -> Any:
        """POST JSON and return the JSON answer; waits for a slot, retries what may pass, within `deadline_s`.

        Raises:
            ContextOverflowError: the API says that the prompt doesn't fit.
            OverloadedError: still 429 or 503 after the retries, or it asks to wait beyond the deadline.
            DeadlineError: `deadline_s` ran out.
            PolicyServerError: it can't be reached, refuses the request, or its answer is not JSON.
        """
        data = json.dumps(body, ensure_ascii=False).encode("utf-8", "replace")
        end = time.monotonic() + deadline_s
        return await self._within(deadline_s, self._post(path, data, end))

    async def _within(self, deadline_s: float, work: Any) -> Any:
        try:
            async with asyncio.timeout(deadline_s) as scope:
                return await work
        except TimeoutError as error:
            if not scope.expired():
                raise
            raise DeadlineError(f"{self.base_url} did not answer within {deadline_s:g} s") from error

    async def _post(self, path: str, data: bytes, end: float) -> Any:
        async with self._slots:
            for attempt in range(self._retries + 1):
                try:
                    return await self._attempt("POST", path, data)
                except (_Passing, aiohttp.ClientError, TimeoutError, ConnectionError) as error:
                    pause = error.retry_after_s if isinstance(error, _Passing) else None
                    wait = pause if pause is not None else random.uniform(0.5, 1.0) * min(0.5 * 2**attempt, 20.0)
                    if attempt == self._retries or time.monotonic() + wait >= end:
                        self._give_up(error, attempt + 1)
                    await asyncio.sleep(wait)
        raise AssertionError("the last attempt returns or raises")

    async def _attempt(self, method: str, path: str, data: bytes | None) -> Any:
        headers = {"Content-Type": "application/json"} if data is not None else {}
        stream = None if data is None else io.BytesIO(data)
        async with (
            asyncio.timeout(self._timeout_s),
            self._session.request(method, self.base_url + path, data=stream, headers=headers) as response,
        ):
            body = await _bounded(response)
            if response.status >= 400:
                self._refuse(response.status, response.headers, body)
            return self._json(path, body)

    def _json(self, path: str, body: bytes) -> Any:
        try:
            return json.loads(body)
        except ValueError as error:
            raise PolicyServerError(
                f"{self.base_url}{path} answered what is not JSON: {self.scrub(_text(body)[:200])!r}",
                hint="is base_url the address of an OpenAI-compatible API?",
            ) from error

    def _refuse(self, status: int, headers: Mapping[str, str], body: bytes) -> NoReturn:
        text, code, parameter = _error_fields(body)
        text = self.scrub(text)[:500]
        if status in (400, 413, 422) and (code == "context_length_exceeded" or _OVERFLOW.search(text)):
            limit, prompt = _LIMIT.search(text), _PROMPT.search(text)
            raise ContextOverflowError(
                prompt_tokens=int(next(filter(None, prompt.groups()))) if prompt else 0,
                context_length=int(limit.group(1)) if limit else 0,
            )
        message = f"{self.base_url} answered {status}: {text}"
        if status in _RETRIED and code != "insufficient_quota":
            raise _Passing(message, status=status, retry_after_s=_retry_after(headers))
        hints = {
            401: f"check the key in ${self._key_name}" if self._key else f"set ${self._key_name}",
            403: f"the key in ${self._key_name} may not use this model",
            404: "check base_url and model",
            429: "the account's quota is used up",
        }
        raise ApiRefusalError(message, status=status, parameter=parameter, hint=hints.get(status))

    def _give_up(self, error: Exception, attempts: int) -> NoReturn:
        tried = f" ({attempts} attempts)" if attempts > 1 else ""
        if isinstance(error, _Passing):
            if error.status in (429, 503, 529):
                raise OverloadedError(f"{error}{tried}", retry_after_s=error.retry_after_s) from error
            raise PolicyServerError(f"{error}{tried}") from error
        raise self.unreachable(error, tried) from error

    def unreachable(self, error: Exception, tried: str = "") -> PolicyServerError:
        """The error for a server that could not be talked to."""
        if isinstance(error, TimeoutError):
            return PolicyServerError(
                f"{self.base_url} did not answer within {self._timeout_s:g} s{tried}", hint="raise timeout_s"
            )
        return PolicyServerError(
            f"can't reach {self.base_url}: {self.scrub(str(error)) or type(error).__name__}{tried}",
            hint="start the server, or set base_url (or $OPENAI_BASE_URL) to where it listens",
        )

    def scrub(self, text: str) -> str:
        """A text from outside without our key."""
        return text.replace(self._key, "***") if self._key else text

    async def aclose(self) -> None:
        """Close the connections."""
        await self._session.close()


class _Passing(Exception):  # noqa: N818  (not an error until the retries are used up)
    def __init__(self, message: str, *, status: int, retry_after_s: float | None) -> None:
        super().__init__(message)
        self.status = status
        self.retry_after_s = retry_after_s


async def _bounded(response: aiohttp.ClientResponse) -> bytes:
    chunks: list[bytes] = []
    size = 0
    async for chunk in response.content.iter_any():
        size += len(chunk)
        if size > _BODY_LIMIT:
            raise PolicyServerError(f"the policy server's answer is larger than {_BODY_LIMIT >> 20} MiB")
        chunks.append(chunk)
    return b"".join(chunks)


def _text(body: bytes) -> str:
    return body.decode("utf-8", "replace")


def _error_fields(body: bytes) -> tuple[str, str, str]:
    """Message, code and parameter of an error body, whatever its shape."""
    try:
        value = json.loads(body)
    except ValueError:
        return _text(body[:2000]), "", ""
    error = value.get("error", value) if isinstance(value, dict) else value
    if not isinstance(error, dict):
        return str(error), "", ""
    message = error.get("message", error.get("detail", error))
    return str(message), str(error.get("code") or ""), str(error.get("param") or "")


def _retry_after(headers: Mapping[str, str]) -> float | None:
    try:
        if "retry-after-ms" in headers:
            return max(float(headers["retry-after-ms"]) / 1000, 0.0)
        value = headers.get("Retry-After")
        if value is None:
            return None
        if re.fullmatch(r"\s*\d+(\.\d+)?\s*", value):
            return float(value)
        return max(email.utils.parsedate_to_datetime(value).timestamp() - time.time(), 0.0)
    except (ValueError, TypeError):
        return None
