# SPDX-License-Identifier: Apache-2.0
# The native module's contract, as Python sees it.
from collections.abc import Buffer, Sequence  # type: ignore[attr-defined]
from typing import Any

class Segment:
    """One fragment of every block: `bytes` at `base + block * block_stride` (addresses, bytes).

    Ranges of different `allocation` ids never merge. Segments are given in slot order: segment i lies behind
    segments 0..i-1 in the slot.
    """

    base: int
    block_stride: int
    bytes: int
    allocation: int
    def __init__(self, base: int, block_stride: int, bytes: int, allocation: int) -> None: ...

class GroupLayout:
    """The blocks of one cache group on this rank. Raises ValueError on overlap or a bad stride."""
    def __init__(self, segments: Sequence[Segment], num_blocks: int) -> None: ...
    @property
    def slot_bytes(self) -> int: ...
    @property
    def num_blocks(self) -> int: ...
    @property
    def segments_per_block(self) -> int: ...

class HostPool:
    """A memfd of block-major slots and a table of their keys and generations (two descriptors).

    `slot_classes`: (slot_bytes, slots) per size class; slot ids count from 0 within a class. Memory is
    reserved but touched lazily unless `prefault`. Raises MemoryError or ValueError with what to change.

    Data: the classes one after the other, each beginning on a 4,096-byte page, slots without gaps. Table: 64 bytes a
    slot in the same order, without gaps: struct "<32sQIIQQ" = key (zero padded), generation, length, key bytes, lease,
    unused. A writer makes the generation odd before the first byte and even after the last; it never goes back.
    """
    def __init__(self, slot_classes: Sequence[tuple[int, int]], prefault: bool = False) -> None: ...
    @staticmethod
    def attach(data_fd: int, table_fd: int, slot_classes: Sequence[tuple[int, int]]) -> HostPool:
        """Another process's pool by its descriptors, which are duplicated. ValueError if sizes and classes differ."""
    @property
    def data_fd(self) -> int: ...
    @property
    def table_fd(self) -> int: ...
    @property
    def address(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    def slot_address(self, slot_class: int, slot: int) -> int: ...
    def slot_view(self, slot_class: int, slot: int) -> memoryview: ...
    def slot_state(self, slot_class: int, slot: int) -> tuple[int, bytes, int]:
        """(generation, key, length in bytes); an odd generation: being written."""
    def close(self) -> None: ...

class SlotTable:
    """One slot class of a pool as the migration agent uses it. Slots are uint32, generations uint64, as bytes.

    The engine's threads write the table meanwhile: what was read is believed only if `still` says so afterwards.
    """
    def __init__(self, pool: HostPool, slot_class: int, key_bytes: int) -> None: ...
    def find(self, joined: Buffer) -> tuple[bytes, bytes]:
        """Slots and generations of the longest run of keys that slots hold."""
    def still(self, slots: Buffer, generations: Buffer) -> bytes:
        """One byte a slot: 1 = it still holds what it held under that generation."""
    def holding(self, slots: Buffer, joined: Buffer) -> bytes:
        """Generation of each slot if it holds its key now, else 0."""
    def begin(self, slots: Buffer) -> None:
        """Being written from now on (odd generation): before the first byte."""
    def end(self, slots: Buffer, joined: Buffer, length: int) -> None:
        """Written, holding these keys: after the last byte."""
    def end_empty(self, slots: Buffer) -> None:
        """Written, holding nothing."""
    def lease(self, slots: Buffer, seconds: float) -> None:
        """Eviction that honours leases leaves the slots alone for that long; 0: no longer."""
    def forget(self, slots: Buffer) -> None:
        """What the slots hold, or are being given, is not found any more; in any process."""
    def forget_all(self) -> None: ...
    def distrust(self, slots: Buffer) -> None:
        """Nor what they will be given, until `forget`."""

class PeerPool:
    """One slot class of a pool of another instance on this machine, by its data file, which is duplicated.

    ValueError unless it is a sealed memory file that holds all slots.
    """
    def __init__(self, fd: int, offset: int, slot_bytes: int, slots: int) -> None: ...
    def read(self, theirs: Buffer, to: HostPool, slot_class: int, ours: Buffer, threads: int) -> bool:
        """Copies slots (uint32, as bytes) into ours, without the GIL. False: not all could be read. Whether they may be
        believed is for the other side to say, afterwards."""

class Policy:
    """backend: auto|memcpy|kernel|chunked|staged; 0 (spread_us: -1) = unset: the device profile decides."""

    backend: str
    max_grid_blocks: int
    chunk_descriptors: int
    chunk_bytes: int
    inflight_chunks: int
    spread_us: int
    def __init__(
        self,
        backend: str = "auto",
        max_grid_blocks: int = 0,
        chunk_descriptors: int = 0,
        chunk_bytes: int = 0,
        inflight_chunks: int = 0,
        spread_us: int = -1,
    ) -> None: ...

class TransferShape:
    direction: str
    ranges: int
    total_bytes: int
    avg_range_bytes: int
    min_range_bytes: int
    alignment: int
    def __init__(
        self,
        direction: str,
        ranges: int,
        total_bytes: int,
        avg_range_bytes: int = 0,
        min_range_bytes: int = 0,
        alignment: int = 16,
    ) -> None: ...

class TransferDecision:
    backend: str
    max_grid_blocks: int
    chunk_descriptors: int
    chunk_bytes: int
    inflight_chunks: int
    spread_us: int
    reason: str

class DeviceProfile:
    """Built from the validated JSON of a device profile (vllm_pega_connector/profiles/)."""
    def __init__(self, profile: dict[str, Any]) -> None: ...
    @property
    def name(self) -> str: ...

def decide(shape: TransferShape, profile: DeviceProfile, objective: str, policy: Policy) -> TransferDecision: ...
def plan(
    layouts: Sequence[GroupLayout],
    pool: HostPool,
    group_classes: Sequence[int],
    moves: Buffer,
    max_range_bytes: int = 0,
) -> list[tuple[int, int, int]]:
    """The merged (device address, host address, bytes) ranges of `moves`, in host order; for tools and tests."""

class Device:
    """Serves one engine at a time."""
    @property
    def name(self) -> str: ...

class HostDevice(Device):
    """Copies with `workers` threads; 'kernel' uses at most min(grid, workers)."""
    def __init__(self, workers: int = 2) -> None: ...

class FaultDevice(Device):
    """Around another device: chunks fail or land late, or the engine's thread dies. Absent from release builds.

    faults: rows of action (fail, delay, kill), direction ("" = both), nth (0 = each, with probability), probability,
    seed, delay in ms. `fired`: faults so far.
    """
    def __init__(self, device: Device, faults: Sequence[tuple[str, str, int, float, int, float]]) -> None: ...
    def arm(self, faults: Sequence[tuple[str, str, int, float, int, float]]) -> None: ...
    @property
    def fired(self) -> int: ...

class SimDevice(Device):
    """Copies real memory, but when and in which order a seed decides; counts what it saw. Single-threaded.

    Pairs are (load, save). `touching`: (device, host, bytes) that copies may still read or write. `violations`: what
    the engine did against the device's contract, in words.
    """
    def __init__(
        self, seed: int, max_delay_steps: int = 8, fail_rate: float = 0.0, break_rate: float = 0.0
    ) -> None: ...
    @property
    def chunks(self) -> int: ...
    @property
    def max_grid(self) -> int: ...
    @property
    def live_events(self) -> int: ...
    @property
    def unready_events(self) -> list[int]: ...
    @property
    def outstanding_bytes(self) -> tuple[int, int]: ...
    @property
    def max_outstanding_bytes(self) -> tuple[int, int]: ...
    @property
    def violations(self) -> list[str]: ...
    def touching(self) -> list[tuple[int, int, int]]: ...

class FakeDriver:
    """Stands in for the CUDA driver in tests: real memory, work that runs late and in any order, any call failing."""

    def __init__(self, seed: int, eagerness: int = 3) -> None: ...
    def fail(self, nth: int, result: int) -> None: ...
    def fail_from(self, nth: int, result: int) -> None: ...
    def settle(self) -> None: ...
    def allocate(self, nbytes: int) -> int: ...
    def view(self, address: int, nbytes: int) -> Any: ...
    @property
    def calls(self) -> int: ...
    @property
    def last_failed(self) -> str: ...
    @property
    def most_copies_ready(self) -> int: ...
    @property
    def live(self) -> int: ...
    @property
    def violations(self) -> list[str]: ...

class CudaDevice(Device):
    """`cubin`: compiled csrc/copy_kernels.cu. Uses the primary context of `ordinal`. Raises RuntimeError.

    stage_bytes: GPU memory of one staged chunk, per direction and chunk in flight. copies_per_slice: copies that a
    memcpy submits at once before it pauses slice_pause_us. driver: a FakeDriver, in tests.
    """

    def __init__(
        self,
        ordinal: int,
        cubin: bytes,
        *,
        stage_bytes: int = ...,
        inflight_chunks: int = ...,
        copies_per_slice: int = ...,
        slice_pause_us: int = ...,
        batch_copies: bool = ...,
        ask_driver_us: int = ...,
        driver: FakeDriver | None = None,
    ) -> None: ...
    def register_host(self, address: int, nbytes: int) -> None:
        """Pins host memory and maps it for the GPU. Raises RuntimeError with what to change."""
    def unregister_host(self, address: int) -> None: ...
    @property
    def name(self) -> str: ...
    @property
    def limits(self) -> dict[str, int]: ...
    @property
    def last_error(self) -> str: ...
    def healthy(self, direction: str) -> bool: ...
    def stats(self, direction: str) -> dict[str, Any]:
        """What the device has seen of a direction: chunks by backend, launches, grids, copies, outstanding bytes."""
    def copy(self, direction: str, backend: str, ranges: Any, grid: int = 8, inflight_slot: int = 0) -> None:
        """Moves uint64 rows (device address, host address, bytes) as one chunk and waits; for tests and tools."""

class JobResult:
    job_id: int
    direction: str  # "load" | "save"
    status: str  # "done" | "failed" | "cancelled" | "timeout"
    error: str
    bytes: int
    ranges: int
    chunks: int
    backend: str
    reason: str
    queue_s: float  # submit -> first chunk submitted
    transfer_s: float  # first chunk submitted -> last byte landed
    peak_outstanding_bytes: int

class TransferEngine:
    """Moves blocks between a device and a host pool. One job = one direction, many (group, block, slot) moves.

    With threaded=False a test drives it by step(); otherwise a native thread does, which never takes the GIL.
    With manual_clock (stepped only) time passes by step(advance_s) alone.
    """
    def __init__(
        self,
        device: Device,
        pool: HostPool,
        layouts: Sequence[GroupLayout],
        group_classes: Sequence[int],
        profile: DeviceProfile,
        objective: str = "balanced",
        load_policy: Policy | None = None,
        save_policy: Policy | None = None,
        threaded: bool = True,
        queue_limit: int = 4096,
        manual_clock: bool = False,
    ) -> None: ...
    def record_event(self, stream: int = 0) -> int:
        """An event on the compute stream, to be given to submit() of any number of jobs, then release_event()."""
    def release_event(self, event: int) -> None:
        """Drops the caller's share; the engine frees it when no job waits for it any more."""
    def submit(
        self,
        job_id: int,
        direction: str,
        moves: Buffer,
        keys: Buffer = b"",
        event: int = 0,
        policy: Policy | None = None,
        objective: str = "",
        timeout_s: float = 30.0,
    ) -> bool:
        """Hands over a job: `moves` is C-contiguous uint32 [n, 3] of (group, block, slot) rows (array or its bytes);
        `keys` n x key_bytes (<= 32) joined. A save stores them in the slot table; a load that gives them fails
        unless every slot holds its key, before and after. False: queue full, nothing was taken.
        Raises ValueError for ids out of range (checked here, once), a job id still in flight, a slot twice in a job,
        a block twice in a load, or a slot that a job not yet returned by poll() writes (or, for a save, reads);
        RuntimeError once closed."""
    def cancel(self, job_id: int) -> bool:
        """Stops submitting; the job still ends exactly once, after what is in flight has drained."""
    def poll(self) -> list[JobResult]:
        """Jobs that ended since the last call; each exactly once."""
    def step(self, advance_s: float = 0.0) -> bool:
        """One round of the state machine; True if anything moved. RuntimeError on a threaded engine."""
    @property
    def pending(self) -> int:
        """Jobs taken and not yet returned by poll()."""
    def drain(self, timeout_s: float) -> bool:
        """Waits (GIL released) until every job has ended; False at the deadline."""
    def close(self, timeout_s: float = 10.0) -> bool:
        """Cancels, drains, stops the thread. False if something is still in flight: memory must then stay mapped."""

def move_rows(parts: Sequence[tuple[int, Sequence[int], Buffer]]) -> bytes:
    """uint32 [n, 3] rows of (group, block, slot) of parts of (group, blocks, uint32 slots)."""

class SlotIndex:
    """Which key lies in which slot: hash map, LRU and reference counts. Slots: free -> reserved -> ready.

    `slots_per_class[c]` slots of class c; `group_classes[g]` is the class of group g. Keys of different groups
    never meet. Joined hashes: n keys of `key_bytes` each, concatenated.
    """
    NO_SLOT: int  # what `reserve` answers for a key that is present or has no room
    def __init__(self, slots_per_class: Sequence[int], group_classes: Sequence[int], key_bytes: int = 32) -> None: ...
    @property
    def key_bytes(self) -> int: ...
    def join(self, keys: Sequence[bytes], begin: int, end: int) -> bytes:
        """b"".join(keys[begin:end]), in half the time where they lie cold in memory; ValueError if one has another
        length than `key_bytes`."""
    def match_and_pin(self, group: int, joined: bytes, start: int = 0) -> bytes:
        """uint32 slots of the longest ready run of keys from index `start` on; each is pinned and made recent."""
    def match(self, group: int, joined: bytes, start: int = 0) -> int:
        """Length of that run; pins nothing."""
    def contains(self, group: int, joined: bytes) -> bytes:
        """One byte a key: 0 absent, 1 reserved (being written), 2 ready."""
    def pin(self, group: int, joined: bytes) -> bytes:
        """uint32 slots of all keys, pinned; ValueError (nothing pinned) unless every key is ready."""
    def unpin(self, group: int, slots: bytes) -> None: ...
    def reserve(self, group: int, joined: bytes, near: int = -1) -> bytes:
        """uint32 slots for keys that are absent, neighbours where possible, starting beside slot `near`; evicts
        least recently used, unpinned slots. Keys already present, and keys there is no room for, get 0xFFFFFFFF."""
    def publish(self, group: int, slots: bytes) -> None:
        """Reserved -> ready."""
    def abandon(self, group: int, slots: bytes) -> None:
        """Reserved -> free; also forgets a ready key (once unpinned)."""
    def disown(self, group: int, slots: bytes) -> None:
        """The keys of reserved slots are absent again; the slots stay reserved until abandoned."""
    def honour_leases(self, slot_class: int, pool: HostPool) -> None:
        """Eviction passes over slots with a lease in this pool's table (any rank's: leases are alike)."""
    def reset(self) -> bool:
        """Forgets every ready, unpinned key. False if something is pinned or reserved: that goes when released."""
    def record_changes(self, limit: int) -> None:
        """From now on keeps what `take_changes` tells, up to `limit` keys; 0 (as it begins): nothing. When they are
        too many, one "cleared" stands for all of them."""
    def take_changes(self) -> list[tuple[str, int, bytes]]:
        """What can be found and what no longer can since the last call: ("stored" or "removed", group, joined keys)
        in order, or ("cleared", 0, b"") for everything."""
    @property
    def version(self) -> int:
        """Changes whenever a match might give another answer."""
    @property
    def evictions(self) -> int: ...
    def totals(self) -> tuple[int, int, int, int, int]:
        """Slots of all classes: free, reserved, ready, pinned, total."""
    def counts(self, slot_class: int = 0) -> dict[str, int]:
        """{"free", "reserved", "ready", "pinned", "total"}; pinned counts slots, within ready."""

def cuda_available() -> str:
    """ "" if the CUDA driver can be loaded and has a device, else why not."""

def cuda_architecture(ordinal: int) -> int:
    """Compute capability as one number: 90 is 9.0. Raises RuntimeError."""
