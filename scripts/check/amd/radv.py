"""Uses Mesa's RADV as a compiler: makes compute pipelines for an AMD GPU that is not present, and
reads the compiled code.

The driver's null winsys takes the name of a GPU from RADV_FORCE_FAMILY. Only the driver itself is
needed: no loader, no Vulkan headers, no installed ICD. A process serves one GPU, since the driver
reads its environment once.
"""

import contextlib
import ctypes as c
import json
import os
import subprocess
import sys
import tempfile

VK_1_3 = 1 << 22 | 3 << 12
COMPUTE_STAGE = 0x20
REQUIRE_FULL_SUBGROUPS = 0x2
CAPTURE_STATISTICS = 0x40
PUSH_CONSTANTS = 128
INTEGRATED_GPUS = ("phoenix", "gfx1150", "gfx1151", "rembrandt", "vangogh")


def _struct(name_, /, **fields):
    return type(name_, (c.Structure,), {"_fields_": list(fields.items())})


_P, _U32, _U64, _SIZE, _STR = c.c_void_p, c.c_uint32, c.c_uint64, c.c_size_t, c.c_char_p
_NAME = c.c_char * 256
_head = {"type": _U32, "next": _P}
# Vulkan's structs, named without `Vk` and `Info`.
ApplicationInfo = _struct(
    "A", **_head, name=_STR, version=_U32, engine=_STR, engine_version=_U32, api=_U32
)
InstanceCreate = _struct(
    "I", **_head, flags=_U32, app=_P, layers=_U32, layer=_P, extensions=_U32, extension=_P
)
QueueCreate = _struct("Q", **_head, flags=_U32, family=_U32, count=_U32, priorities=_P)
DeviceCreate = _struct(
    "D",
    **_head,
    flags=_U32,
    queues=_U32,
    queue=_P,
    layers=_U32,
    layer=_P,
    extensions=_U32,
    extension=_P,
    features=_P,
)
PushRange = _struct("R", stages=_U32, offset=_U32, size=_U32)
LayoutCreate = _struct("L", **_head, flags=_U32, sets=_U32, set=_P, ranges=_U32, range=_P)
ModuleCreate = _struct("M", **_head, flags=_U32, bytes=_SIZE, code=_P)
MapEntry = _struct("E", id=_U32, offset=_U32, size=_SIZE)
Specialization = _struct("S", count=_U32, entries=_P, bytes=_SIZE, data=_P)
SubgroupSize = _struct("G", **_head, size=_U32)
Stage = _struct("T", **_head, flags=_U32, stage=_U32, module=_U64, name=_STR, special=_P)
PipelineCreate = _struct(
    "C", **_head, flags=_U32, stage=Stage, layout=_U64, base=_U64, index=c.c_int32
)
Executable = _struct("X", **_head, pipeline=_U64, index=_U32)
Statistic = _struct("U", **_head, name=_NAME, text=_NAME, format=_U32, value=_U64)
Subgroups = _struct("Y", **_head, least=_U32, most=_U32, of_workgroup=_U32, stages=_U32)
MatrixShape = _struct(
    "W",
    **_head,
    m=_U32,
    n=_U32,
    k=_U32,
    a=_U32,
    b=_U32,
    c=_U32,
    result=_U32,
    saturates=_U32,
    scope=_U32,
)
SINT8, SINT32, SUBGROUP_SCOPE = 3, 5, 3


class RadvError(Exception):
    pass


@contextlib.contextmanager
def stderr_in(file):
    """Redirects stderr of C code to a file within the block."""
    kept = os.dup(2)
    os.dup2(file.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def _features(kind, count, following=None):
    """Makes a struct of `count` booleans."""
    return _struct("F", **_head, on=_U32 * count)(kind, following and c.addressof(following))


class Compiler:
    """The driver of one GPU, which RADV_FORCE_FAMILY names."""

    def __init__(self, driver):
        library = c.CDLL(driver)
        self._get = library.vk_icdGetInstanceProcAddr
        self._get.restype, self._get.argtypes = _P, [_P, _STR]
        library.vk_icdNegotiateLoaderICDInterfaceVersion(c.byref(_U32(5)))
        self._instance = None
        self._modules = {}
        app = ApplicationInfo(0, None, b"gemma", 0, b"gemma", 0, VK_1_3)
        self._instance = self._make(
            "vkCreateInstance", InstanceCreate(1, None, 0, c.addressof(app))
        )
        count, gpu = _U32(1), _U64()
        self._call("vkEnumeratePhysicalDevices", self._instance, count, gpu)
        self.gpu = gpu.value
        self._open()

    def _call(self, name, *arguments):
        """Calls a function. Arguments that are not numbers are passed by address."""
        at = self._get(self._instance, name.encode())
        if not at:
            raise RadvError(f"the driver has no {name}")
        numbers = [
            a or 0 if a is None or isinstance(a, int) else c.addressof(a) for a in arguments
        ]
        return c.CFUNCTYPE(c.c_int32, *[_U64] * len(numbers))(at)(*numbers)

    def _make(self, name, info, *before):
        out = _U64()
        result = self._call(name, *before, info, None, out)
        if result:
            raise RadvError(f"{name} failed: {result}")
        return out.value

    def _open(self):
        """Opens the device with all its features except robustness, which adds code."""
        matrix = _features(1000506000, 2)
        v13 = _features(53, 15, matrix)
        v12 = _features(51, 47, v13)
        v11 = _features(
            49, 12, v12
        )  # each is held by a name: an address alone keeps nothing alive
        features = _features(1000059000, 55, v11)
        self._call("vkGetPhysicalDeviceFeatures2", self.gpu, features)
        features.on[0] = v13.on[0] = 0  # robustBufferAccess, robustImageAccess
        self.has_matrices = bool(matrix.on[0])
        statistics = _features(1000269000, 1, features)
        statistics.on[0] = 1
        priority = c.c_float(1)
        queue = QueueCreate(2, None, 0, 0, 1, c.addressof(priority))
        names = [b"VK_KHR_pipeline_executable_properties"] + [
            b"VK_KHR_cooperative_matrix"
        ] * self.has_matrices
        names = (_STR * len(names))(*names)
        info = DeviceCreate(
            3,
            c.addressof(statistics),
            0,
            1,
            c.addressof(queue),
            0,
            None,
            len(names),
            c.addressof(names),
        )
        self.device = self._make("vkCreateDevice", info, self.gpu)
        span = PushRange(COMPUTE_STAGE, 0, PUSH_CONSTANTS)
        self._layout = self._make(
            "vkCreatePipelineLayout",
            LayoutCreate(30, None, 0, 0, None, 1, c.addressof(span)),
            self.device,
        )

    def describe(self, chip):
        """Returns the device features that the program uses, in the form of `examples/kernels`."""
        subgroups = Subgroups(1000225000)
        # VkPhysicalDeviceProperties2: 16 bytes of head, then properties. Their limits begin at byte
        # 296.
        raw = c.create_string_buffer(2048)
        c.c_uint32.from_buffer(raw, 0).value = 1000059001
        c.c_uint64.from_buffer(raw, 8).value = c.addressof(subgroups)
        self._call("vkGetPhysicalDeviceProperties2", self.gpu, raw)
        limit = lambda at: c.c_uint32.from_buffer(raw, 16 + 296 + at).value
        shapes = []
        if self.has_matrices:
            count = _U32()
            self._call("vkGetPhysicalDeviceCooperativeMatrixPropertiesKHR", self.gpu, count, None)
            found = (MatrixShape * count.value)(
                *[MatrixShape(1000506001) for _ in range(count.value)]
            )
            self._call("vkGetPhysicalDeviceCooperativeMatrixPropertiesKHR", self.gpu, count, found)
            wanted = (SINT8, SINT8, SINT32, SINT32, SUBGROUP_SCOPE)
            shapes = sorted(
                {(s.m, s.n, s.k) for s in found if (s.a, s.b, s.c, s.result, s.scope) == wanted}
            )
        return {
            "chip": chip,
            "name": raw.raw[36:292].split(b"\0")[0].decode(),
            # The driver decides by its memory, and the null winsys has none.
            "integrated": chip in INTEGRATED_GPUS,
            "min_subgroup": subgroups.least,
            "max_subgroup": subgroups.most,
            "asks_subgroup": bool(subgroups.stages & COMPUTE_STAGE),
            "max_subgroups": subgroups.of_workgroup,
            "max_shared": limit(216),
            "max_workgroup": limit(232),
            "int8_matrices": shapes,
        }

    def _module(self, path):
        if path not in self._modules:
            with open(path, "rb") as f:
                code = f.read()
            kept = c.create_string_buffer(code, len(code))
            info = ModuleCreate(16, None, 0, len(code), c.addressof(kept))
            self._modules[path] = self._make("vkCreateShaderModule", info, self.device)
        return self._modules[path]

    def compile(self, path, constants, subgroup):
        """Makes a pipeline from a SPIR-V file. Returns the driver's statistics and its listing of
        the instructions."""
        entries = (MapEntry * len(constants))(
            *[MapEntry(id_, 4 * i, 4) for i, (id_, _) in enumerate(constants)]
        )
        values = (_U32 * len(constants))(*[value for _, value in constants])
        special = Specialization(
            len(constants), c.addressof(entries), c.sizeof(values), c.addressof(values)
        )
        size = SubgroupSize(1000225001, None, subgroup)
        stage = Stage(
            18,
            c.addressof(size) if subgroup else None,
            REQUIRE_FULL_SUBGROUPS,
            COMPUTE_STAGE,
            self._module(path),
            b"main",
            c.addressof(special),
        )
        info = PipelineCreate(29, None, CAPTURE_STATISTICS, stage, self._layout, 0, -1)
        pipeline = _U64()
        # With ACO_DEBUG=perfinfo the compiler writes its last form of the kernel to stderr, also
        # for GPUs that Mesa's LLVM is too old to disassemble.
        with tempfile.TemporaryFile() as listing:
            with stderr_in(listing):
                result = self._call(
                    "vkCreateComputePipelines", self.device, None, 1, info, None, pipeline
                )
            listing.seek(0)
            text = listing.read().decode(errors="replace")
        if result:
            raise RadvError(
                f"the driver compiles no {os.path.basename(path)} {constants}: {result}"
            )
        part, count = Executable(1000269003, None, pipeline.value, 0), _U32()
        self._call("vkGetPipelineExecutableStatisticsKHR", self.device, part, count, None)
        found = (Statistic * count.value)(*[Statistic(1000269004) for _ in range(count.value)])
        self._call("vkGetPipelineExecutableStatisticsKHR", self.device, part, count, found)
        self._call("vkDestroyPipeline", self.device, pipeline.value, None)
        return {s.name.decode(): s.value for s in found}, text


def start(driver, chip):
    """Starts a process that serves one GPU: see `serve`."""
    libraries = os.pathsep.join(
        filter(None, [os.path.dirname(driver), os.environ.get("LD_LIBRARY_PATH")])
    )
    mesa = {
        "RADV_FORCE_FAMILY": chip,
        "ACO_DEBUG": "perfinfo",
        "MESA_SHADER_CACHE_DISABLE": "1",
        "RADV_DEBUG": "nocache",
    }
    command = [sys.executable, os.path.abspath(__file__), driver, chip]
    env = {**os.environ, **mesa, "LD_LIBRARY_PATH": libraries}
    return subprocess.Popen(
        command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def serve(driver, chip):
    """Prints a description of the GPU as a line of JSON. Then compiles a pipeline for each line of
    the input, and prints a line for each."""
    try:
        # The driver reports that the device is missing.
        with tempfile.TemporaryFile() as complaints, stderr_in(complaints):
            compiler = Compiler(driver)
        print(json.dumps(compiler.describe(chip)), flush=True)
        for line in sys.stdin:
            job = json.loads(line)
            statistics, listing = compiler.compile(job["path"], job["constants"], job["subgroup"])
            print(json.dumps({"statistics": statistics, "listing": listing}), flush=True)
    except (RadvError, OSError) as e:
        sys.exit(f"radv.py: {chip}: {e}")


if __name__ == "__main__":
    serve(*sys.argv[1:])
