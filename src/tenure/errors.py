"""Every error Tenure raises on purpose, drawn as one tree.

    TenureError
    ├── ConfigError             a setting, flag or file of the operator is wrong
    │   └── BudgetError         … the memory budget cannot hold what it must
    ├── ModelError              the model cannot be used
    │   ├── ModelNotFound       … because it is not there
    │   ├── BrokenFile          … because a file is truncated, hostile or contradictory
    │   └── UnsupportedModel    … because Tenure does not serve its kind
    ├── RequestError            a client asked for what cannot be given; becomes an HTTP error
    │   ├── InvalidRequest      400
    │   ├── ContextLengthExceeded, KvCapacityExceeded   400, with the numbers
    │   ├── Unauthorized        401
    │   ├── Forbidden           403
    │   ├── UnknownModel        404
    │   ├── NotFound            404
    │   ├── MethodNotAllowed    405
    │   ├── SlowClient          408, the client did not send or read in time
    │   ├── PayloadTooLarge     413
    │   ├── QueueFull           429, with the predicted start
    │   ├── Internal            500
    │   ├── NotBuilt            501
    │   ├── Overloaded, Draining, EngineDead            503
    │   └── TimedOut            504
    ├── StalePlan               a plan was applied after the cache had moved on
    └── Corrupt                 an invariant of the cache does not hold
"""

from __future__ import annotations

Number = int | float


class TenureError(Exception):
    """The root: catching it catches everything Tenure raises on purpose."""


class ConfigError(TenureError):
    """A setting is wrong; `param` names it."""

    def __init__(self, param: str, message: str) -> None:
        super().__init__(message)
        self.param = param


class BudgetError(ConfigError):
    """The memory budget is too small for one block, or larger than the machine."""


class ModelError(TenureError):
    """A model cannot be used; the message names the file, the field and the numbers."""


class ModelNotFound(ModelError):
    """There is no model at that path or hub id."""


class BrokenFile(ModelError):
    """A model file is truncated, hostile or contradicts itself."""


class UnsupportedModel(ModelError):
    """The model is of a kind Tenure does not serve; the message lists what it does."""


class RequestError(TenureError):
    """A request that is refused: `code`, `status`, `param` and the numbers that bind."""

    status = 400
    code = "invalid_request"
    kind = "invalid_request_error"

    def __init__(self, message: str, *, param: str | None = None, **numbers: Number) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.numbers = numbers

    @property
    def retry_after_s(self) -> float | None:
        """Seconds until another try makes sense, for the Retry-After headers."""
        value = self.numbers.get("retry_after_s")
        return None if value is None else float(value)


class InvalidRequest(RequestError):
    """A field is missing, of the wrong type, out of range or not built yet."""


class ContextLengthExceeded(RequestError):
    """The prompt leaves no room in the context. Numbers: prompt_tokens, requested_tokens, limit."""

    code = "context_length_exceeded"


class KvCapacityExceeded(RequestError):
    """The prompt can never fit the pool. Numbers: needed_blocks, pool_blocks."""

    code = "kv_capacity_exceeded"


class Unauthorized(RequestError):
    status = 401
    code = "unauthorized"
    kind = "authentication_error"


class Forbidden(RequestError):
    """A tenant asked for what is the operator's."""

    status = 403
    code = "forbidden"
    kind = "permission_error"


class UnknownModel(RequestError):
    status = 404
    code = "model_not_found"


class NotFound(RequestError):
    status = 404
    code = "not_found"


class Deleted(RequestError):
    """The request's conversation was deleted while it ran."""

    status = 409
    code = "conversation_deleted"


class MethodNotAllowed(RequestError):
    status = 405
    code = "method_not_allowed"


class SlowClient(RequestError):
    """The client did not send its body, or did not read its stream, in time."""

    status = 408
    code = "client_too_slow"


class PayloadTooLarge(RequestError):
    status = 413
    code = "payload_too_large"


class QueueFull(RequestError):
    """The bounded queue is full. Numbers: queued_requests|queued_tokens, limit, retry_after_s."""

    status = 429
    code = "queue_full"
    kind = "rate_limit_error"


class Internal(RequestError):
    """The request failed on our side; the log has the details."""

    status = 500
    code = "internal_error"
    kind = "server_error"


class NotBuilt(RequestError):
    """The route is known to other servers and does not exist here yet."""

    status = 501
    code = "not_implemented"
    kind = "server_error"


class TimedOut(RequestError):
    """The answer took longer than the server allows. Numbers: limit_s."""

    status = 504
    code = "request_timeout"
    kind = "server_error"


class Overloaded(RequestError):
    status = 503
    code = "overloaded"
    kind = "overloaded_error"


class Draining(RequestError):
    status = 503
    code = "draining"
    kind = "overloaded_error"


class EngineDead(RequestError):
    """The engine thread stopped on an unexpected error; the process must be restarted."""

    status = 503
    code = "engine_dead"
    kind = "overloaded_error"


class StalePlan(TenureError):
    """The cache changed between plan and apply; plan again."""


class Corrupt(TenureError):
    """An invariant does not hold: a bug, never a user's mistake."""
