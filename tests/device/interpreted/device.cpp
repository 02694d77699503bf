// NVIDIA's driver and run-time library, as far as CuPy asks for them: memory is the host's, kernels are PTX, and what is
// put on a stream is done when CUDA's rules let somebody see that it was not done before.
//
//   lazy    queued work is done as late as can be: when the host waits, or another stream waits for it
//   race    that of the default stream; all other streams' work is done as early as what they wait for allows
//   exact   at once; threads and blocks come in reverse order
//
// Of a graph's streams the one that began comes as early as it can, in "race" as late.
//
// NNMPI_TEST_GPU names one. Nothing here knows cuDNN, NCCL, or how long anything takes.
#include <dlfcn.h>
#include <link.h>
#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <numeric>
#include <set>
#include <thread>

#include "ptx.h"

#define API extern "C" __attribute__((visibility("default")))
#define CUDART(name) API int device_cuda##name  // takes the place of cuda##name in CuPy's own copy of the library

namespace {

using Clock = std::chrono::steady_clock;
enum Status { OK = 0, INVALID = 1, NO_MEMORY = 2, NO_DEVICE = 101, BAD_IMAGE = 218, BAD_HANDLE = 400, ILLEGAL_STATE = 401, NOT_FOUND = 500, NOT_READY = 600,
    BAD_ADDRESS = 700, NOT_THERE = 801, UNSUPPORTED = 900, INVALIDATED, MERGE, UNMATCHED, UNJOINED, ISOLATION, IMPLICIT, CAPTURED_EVENT, WRONG_THREAD };
const uint64_t PAGE = 4096, TOTAL = 80ull << 30, RUBBISH_AT_MOST = 64 << 20;
const unsigned MOST_SHARED = 49152;

std::recursive_mutex mutex;
const std::string mode = getenv("NNMPI_TEST_GPU") ? getenv("NNMPI_TEST_GPU") : "lazy";
int failed = OK;  // what a kernel did wrong stays, as there
std::string words;
uint64_t used = 0;

int refuse(int status, const std::string& why) {
    words = why;
    fprintf(stderr, "interpreted device: %s\n", why.c_str());
    return status;
}

// ---------------------------------------------------------------- memory

struct Range {
    uint64_t size;
    bool pinned;  // the host's
};
std::map<uint64_t, Range> ranges;
size_t changes = 1;  // of them

// Returns the range around some bytes.
const Range* around(uint64_t at, uint64_t size) {
    static uint64_t low = 1, high = 0;  // the one that was found last: kernels ask for each access
    static const Range* last = nullptr;
    static size_t version = 0;
    if (version == changes && at >= low && at + size <= high) return last;
    auto found = ranges.upper_bound(at);
    if (found == ranges.begin()) return nullptr;
    --found;
    if (at + size > found->first + found->second.size) return nullptr;
    low = found->first;
    high = low + found->second.size;
    version = changes;
    return last = &found->second;
}

bool on_device(const void* at, uint64_t size = 1) {
    const Range* found = around((uint64_t)at, size);
    return found && !found->pinned;
}
bool in_pinned(const void* at, uint64_t size = 1) {
    const Range* found = around((uint64_t)at, size);
    return found && found->pinned;
}

// New memory is full of rubbish, and a page behind it is nobody's.
void* map_memory(uint64_t size, bool pinned) {
    uint64_t whole = (size + PAGE - 1) / PAGE * PAGE;
    void* at = mmap(nullptr, whole + PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (at == MAP_FAILED) return nullptr;
    mprotect((char*)at + whole, PAGE, PROT_NONE);
    if (whole <= RUBBISH_AT_MOST) memset(at, 0xFF, whole);
    ranges[(uint64_t)at] = {size, pinned};
    ++changes;
    return at;
}
bool unmap_memory(void* at, bool pinned) {
    auto found = ranges.find((uint64_t)at);
    if (found == ranges.end() || found->second.pinned != pinned) return false;
    munmap(at, (found->second.size + PAGE - 1) / PAGE * PAGE + PAGE);
    ranges.erase(found);
    ++changes;
    return true;
}

// ---------------------------------------------------------------- streams

struct Stream;
struct Capture;
using Captured = std::shared_ptr<Capture>;
struct Item {
    std::function<void()> work;  // or
    Stream* other = nullptr;     // a stream that has to come
    uint64_t place = 0;          // so far
};
struct Stream {
    bool blocking = true;  // the default stream and this one wait for one another
    uint64_t issued = 0, done = 0;
    std::deque<Item> queue;
    Captured capture;       // which work goes to
    std::set<size_t> last;  // of its work, what comes next in this stream waits for
};
struct Event {
    Stream* stream = nullptr;
    uint64_t place = 0;
    Clock::time_point time;
    Captured capture = nullptr;  // in which it was recorded
    std::set<size_t> last = {};  // what of it stands before
};

Stream null_stream;
std::set<Stream*> streams;

Stream* stream_of(void* handle) { return handle <= (void*)2 ? &null_stream : (Stream*)handle; }  // 1 and 2 are names of it

void advance(Stream* s, uint64_t place) {
    while (s->done < place && !s->queue.empty()) {
        Item item = std::move(s->queue.front());
        s->queue.pop_front();
        if (item.other) advance(item.other, item.place);
        else if (!failed) {
            try {
                item.work();
            } catch (const ptx::Error& error) {
                failed = refuse(error.code, error.text);
            }
        }
        ++s->done;
    }
}
void drain(Stream* s) { advance(s, s->issued); }
void drain_all() {
    for (Stream* each : streams) drain(each);
    drain(&null_stream);
}

void push(Stream* s, Item item) {
    s->queue.push_back(std::move(item));
    ++s->issued;
}
void push_wait(Stream* s, Stream* other, uint64_t place) {
    if (other != s && other->done < place) push(s, {nullptr, other, place});
}
void meet_default(Stream* s) {
    if (s != &null_stream && s->blocking) push_wait(s, &null_stream, null_stream.issued);
    if (s == &null_stream)
        for (Stream* each : streams)
            if (each->blocking) push_wait(s, each, each->issued);
}
void run_what_is_ready(Stream* s) {
    while (!s->queue.empty() && (!s->queue.front().other || s->queue.front().other->done >= s->queue.front().place)) advance(s, s->done + 1);
}
uint64_t enqueued;  // kernels, products, copies and fills, of all streams

// ---------------------------------------------------------------- captures

enum CaptureMode { ANYWHERE, IN_THREAD, RELAXED };  // where calls are refused that could get in the way
struct Node {
    std::function<void()> work;
    std::set<size_t> after;
};
struct Capture {
    CaptureMode mode;
    std::thread::id thread;
    std::vector<Stream*> streams;  // the first one began
    std::vector<Node> nodes;
    bool active = true, broken = false;
};
std::set<Captured> captures;  // those that are active

// Work in an order that its waits allow: of what may come first, what was asked for first, or last in mode "race".
using Graph = std::vector<std::function<void()>>;

int spoil(const Captured& capture, int status, const char* why) {
    capture->broken = true;
    return refuse(status, why);
}
// Returns whether a stream can be used that captures nothing: the default stream waits for all blocking ones.
int beside_captures(Stream* s) {
    for (auto& each : captures)
        for (Stream* other : each->streams)
            if (s == &null_stream && other->blocking) return spoil(each, IMPLICIT, "the default stream is used while a blocking stream captures");
    return OK;
}
// Returns whether a call can be made that may wait for all of the device.
int unsafe(const char* call) {
    for (auto& each : captures)
        if (each->mode == ANYWHERE || (each->mode == IN_THREAD && each->thread == std::this_thread::get_id()))
            return spoil(each, UNSUPPORTED, (std::string(call) + " during a capture that is not relaxed").c_str());
    return OK;
}
void leave_capture(Stream* s) {
    s->capture = nullptr;
    s->last.clear();
}
int end_capture(Stream* s, Graph* graph) {
    Captured capture = s->capture;
    if (s != capture->streams[0]) return spoil(capture, UNMATCHED, "a capture is ended in another stream than it began");
    if (capture->mode != RELAXED && capture->thread != std::this_thread::get_id()) return spoil(capture, WRONG_THREAD, "a capture is ended by another thread");
    capture->active = false;
    captures.erase(capture);
    std::set<size_t> last = s->last;
    for (Stream* each : capture->streams) leave_capture(each);
    if (capture->broken) return refuse(INVALIDATED, "the capture has been spoilt");

    std::vector<std::pair<size_t, bool>> waiting;  // whether what it waits for is done
    std::vector<bool> done(capture->nodes.size());
    auto ask = [&](const std::set<size_t>& which) {
        if (mode == "race")
            for (size_t n : which) waiting.push_back({n, false});
        else
            for (auto n = which.rbegin(); n != which.rend(); ++n) waiting.push_back({*n, false});
    };
    ask(last);
    while (!waiting.empty()) {
        auto [n, ready] = waiting.back();
        waiting.pop_back();
        if (done[n]) continue;
        if (ready) {
            done[n] = true;
            graph->push_back(std::move(capture->nodes[n].work));
        } else {
            waiting.push_back({n, true});
            ask(capture->nodes[n].after);
        }
    }
    return graph->size() < capture->nodes.size() ? refuse(UNJOINED, "a stream that has come to a capture was not joined") : OK;
}

int enqueue(void* handle, std::function<void()> work) {
    ++enqueued;
    Stream* s = stream_of(handle);
    if (s->capture) {
        if (s->capture->broken) return refuse(INVALIDATED, "work for a capture that has been spoilt");
        s->capture->nodes.push_back({std::move(work), s->last});
        s->last = {s->capture->nodes.size() - 1};
        return OK;
    }
    if (int status = beside_captures(s)) return status;
    meet_default(s);
    push(s, {std::move(work)});
    if (mode == "exact") drain(s);
    else if (mode == "race")
        for (Stream* each : streams) run_what_is_ready(each);
    return OK;
}

// Memory may be gone when a graph comes to it.
void look(const void* at, size_t size) {
    if (!around((uint64_t)at, size)) throw ptx::Error{BAD_ADDRESS, "a copy in memory that is no array's any more"};
}

int copy(void* to, const void* from, size_t size, int kind, void* stream, bool waits) {
    if (failed || !size) return failed;
    bool to_device = on_device(to), from_device = on_device(from);
    const bool wanted[][2] = {{false, false}, {true, false}, {false, true}, {true, true}};
    if (kind < 4 && (wanted[kind][0] != to_device || wanted[kind][1] != from_device)) return refuse(INVALID, "a copy of another kind than it says");
    if ((to_device && !on_device(to, size)) || (from_device && !on_device(from, size))) return refuse(INVALID, "a copy past the end of an array");
    bool host_reads = !to_device && !in_pinned(to), host_writes = !from_device && !in_pinned(from);
    Stream* s = stream_of(stream);
    if (waits)
        if (int status = unsafe("cudaMemcpy")) return status;
    if (s->capture && (host_reads || host_writes)) return spoil(s->capture, UNSUPPORTED, "a copy of the host's pageable memory in a stream that captures");
    int status;
    if (!host_writes) {
        status = enqueue(stream, [=] {
            if (to_device) look(to, size);
            look(from, size);
            memmove(to, from, size);
        });
    } else {  // the bytes have been taken when the call returns
        std::vector<uint8_t> bytes((const uint8_t*)from, (const uint8_t*)from + size);
        status = enqueue(stream, [=] { memcpy(to, bytes.data(), size); });
    }
    if (status) return status;
    if (waits || host_reads) drain(s);
    return failed;
}
int fill(void* at, int value, size_t size, void* stream) {
    if (failed || !size) return failed;
    if (!on_device(at, size)) return refuse(INVALID, "memory to fill that is no array's");
    int status = enqueue(stream, [=] {
        look(at, size);
        memset(at, value, size);
    });
    return status ? status : failed;
}

struct Function {
    const ptx::Kernel* kernel;
};
#define LOCKED std::lock_guard<std::recursive_mutex> lock(mutex)

}  // namespace

bool ptx::reachable(uint64_t address, size_t size) { return around(address, size) != nullptr; }
void ptx::remember(uint64_t address, size_t size) {
    ranges[address] = {size, false};
    ++changes;
}

// ---------------------------------------------------------------- for the library of products

API uint64_t device_enqueued() { return enqueued; }
API int device_enqueue(void* stream, std::function<void()> work) {
    LOCKED;
    return enqueue(stream, std::move(work));
}
// Sorts rows, and says where each value was; equal ones keep their order, NaN comes last.
template <class T> void sort_rows(T* values, int64_t* places, size_t rows, size_t n) {
    for (; rows--; values += n, places += n) {
        std::iota(places, places + n, 0);
        std::stable_sort(places, places + n, [=](int64_t a, int64_t b) { return values[a] < values[b] || (values[b] != values[b] && values[a] == values[a]); });
        std::vector<T> sorted(n);
        for (size_t i = 0; i < n; ++i) sorted[i] = values[places[i]];
        std::copy(sorted.begin(), sorted.end(), values);
    }
}
API int device_sort(char kind, int bytes, void* values, int64_t* places, size_t rows, size_t n, void* stream) {
    LOCKED;
    auto as = [=]<class T>(T) {
        return enqueue(stream, [=] {
            look(values, rows * n * sizeof(T));
            look(places, rows * n * sizeof(int64_t));
            sort_rows((T*)values, places, rows, n);
        });
    };
    if (kind == 'f') return bytes == 2 ? as((_Float16)0) : bytes == 4 ? as(0.0f) : as(0.0);
    if (kind == 'i') return bytes == 1 ? as((int8_t)0) : bytes == 2 ? as((int16_t)0) : bytes == 4 ? as((int32_t)0) : as((int64_t)0);
    return bytes == 1 ? as((uint8_t)0) : bytes == 2 ? as((uint16_t)0) : bytes == 4 ? as((uint32_t)0) : as((uint64_t)0);
}
API bool device_has(const void* at, uint64_t size) { return on_device(at, size); }
API void device_fail(int code, const char* why) { throw ptx::Error{code, why}; }
API int device_lacks(const char* name) { return refuse(NOT_THERE, std::string(name) + " is not there"); }

// ---------------------------------------------------------------- the way in

// CuPy has a copy of the run-time library of its own in it. Its functions, whose places stand in a table that is made
// when this is built, begin with a jump from now on.
struct Hook {
    uint64_t place;
    void* instead;
};
extern const Hook hooks[];
extern const size_t hook_count;
API int device_attach(const char* path) {
    auto* library = (link_map*)dlopen(path, RTLD_LAZY | RTLD_GLOBAL);
    if (!library) return NOT_FOUND;
    for (size_t n = 0; n < hook_count; ++n) {
        auto* at = (uint8_t*)library->l_addr + hooks[n].place;
        auto* page = (void*)((uint64_t)at / PAGE * PAGE);
        if (mprotect(page, 2 * PAGE, PROT_READ | PROT_WRITE | PROT_EXEC)) return INVALID;
        uint8_t jump[13] = {0x49, 0xBB, 0, 0, 0, 0, 0, 0, 0, 0, 0x41, 0xFF, 0xE3};  // mov r11, address; jmp r11
        memcpy(jump + 2, &hooks[n].instead, 8);
        memcpy(at, jump, sizeof(jump));
    }
    return OK;
}

// ---------------------------------------------------------------- the driver

API int cuGetErrorName(int, const char** text) { return *text = "CUDA_ERROR", OK; }
API int cuGetErrorString(int, const char** text) { return *text = words.c_str(), OK; }
API int cuDriverGetVersion(int* version) { return *version = 13000, OK; }
API int cuCtxGetCurrent(void** context) { return *context = (void*)0xC0, OK; }
API int cuCtxSetCurrent(void*) { return OK; }
API int cuCtxGetDevice(int* device) { return *device = 0, OK; }
API int cuDevicePrimaryCtxRelease_v2(int) { return OK; }
API int cuModuleLoadData(void** module, const char* image) {
    LOCKED;
    try {
        *module = ptx::read(image).release();
    } catch (const ptx::Error& error) {
        return refuse(BAD_IMAGE, error.text);
    }
    return OK;
}
API int cuModuleUnload(void*) { return OK; }
API int cuModuleGetFunction(void** function, void* module, const char* name) {
    LOCKED;
    try {
        *function = new Function{&ptx::kernel(*(ptx::Module*)module, name)};
    } catch (const ptx::Error& error) {
        return refuse(error.code, error.text);
    }
    return OK;
}
API int cuModuleGetGlobal_v2(uint64_t* at, size_t* size, void* module, const char* name) {
    auto& globals = ((ptx::Module*)module)->globals;
    auto found = globals.find(name);
    if (found == globals.end()) return NOT_FOUND;
    *at = found->second.offset;
    if (size) *size = found->second.size;
    return OK;
}
API int cuLaunchKernel(void* function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared,
                       void* stream, void** values, void**) {
    LOCKED;
    if (failed) return failed;
    const ptx::Kernel& k = *((Function*)function)->kernel;
    uint64_t threads = (uint64_t)bx * by * bz;
    if (!gx || !gy || !gz || !threads || gx > 0x7FFFFFFF || gy > 65535 || gz > 65535 || bx > 1024 || by > 1024 || bz > 64 || threads > k.most_threads)
        return refuse(INVALID, "sizes of grid or block that " + k.name + " cannot have");
    if (shared + k.shared_bytes > MOST_SHARED) return refuse(INVALID, "too much shared memory for " + k.name);
    ptx::Launch launch{{gx, gy, gz}, {bx, by, bz}, shared, {}, mode == "exact"};
    for (size_t n = 0; n < k.parameters.size(); ++n) {
        const ptx::Place& place = k.parameters[n];
        launch.arguments.resize(place.offset + place.size);
        memcpy(&launch.arguments[place.offset], values[n], place.size);
    }
    return enqueue(stream, [&k, launch] { ptx::run(k, launch); });
}
API int cuFuncGetAttribute(int* value, int which, void* function) {
    const ptx::Kernel& k = *((Function*)function)->kernel;
    *value = which == 0 ? (int)k.most_threads : which == 1 ? (int)k.shared_bytes : which == 4 ? 32 : 0;
    return OK;
}
API int cuFuncSetAttribute(void*, int, int) { return OK; }
API int cuOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, void*, int, size_t) { return *blocks = 2, OK; }
API int cuOccupancyMaxPotentialBlockSize(int* grid, int* block, void* function, void*, size_t, int) {
    *grid = 132;
    *block = (int)std::min(512u, ((Function*)function)->kernel->most_threads);
    return OK;
}

// ---------------------------------------------------------------- the run-time library

API const char* device_cudaGetErrorName(int status) {
    static const std::map<int, const char*> names = {{OK, "cudaSuccess"}, {INVALID, "cudaErrorInvalidValue"}, {NO_MEMORY, "cudaErrorMemoryAllocation"},
        {NO_DEVICE, "cudaErrorInvalidDevice"}, {ILLEGAL_STATE, "cudaErrorIllegalState"}, {NOT_READY, "cudaErrorNotReady"},
        {BAD_ADDRESS, "cudaErrorIllegalAddress"}, {716, "cudaErrorMisalignedAddress"}, {UNSUPPORTED, "cudaErrorStreamCaptureUnsupported"},
        {INVALIDATED, "cudaErrorStreamCaptureInvalidated"}, {MERGE, "cudaErrorStreamCaptureMerge"}, {UNMATCHED, "cudaErrorStreamCaptureUnmatched"},
        {UNJOINED, "cudaErrorStreamCaptureUnjoined"}, {ISOLATION, "cudaErrorStreamCaptureIsolation"}, {IMPLICIT, "cudaErrorStreamCaptureImplicit"},
        {CAPTURED_EVENT, "cudaErrorCapturedEvent"}, {WRONG_THREAD, "cudaErrorStreamCaptureWrongThread"}};
    auto found = names.find(status);
    return found == names.end() ? "cudaErrorUnknown" : found->second;
}
API const char* device_cudaGetErrorString(int status) { return status && !words.empty() ? words.c_str() : device_cudaGetErrorName(status); }
CUDART(GetLastError)() { return OK; }
CUDART(PeekAtLastError)() { return OK; }
CUDART(DriverGetVersion)(int* version) { return *version = 13000, OK; }
CUDART(RuntimeGetVersion)(int* version) { return *version = 13000, OK; }
CUDART(GetDevice)(int* device) { return *device = 0, OK; }
CUDART(SetDevice)(int device) { return device ? NO_DEVICE : OK; }
CUDART(GetDeviceCount)(int* count) { return *count = 1, OK; }
CUDART(DeviceGetPCIBusId)(char* text, int length, int) { return snprintf(text, (size_t)length, "0000:3B:00.0"), OK; }
CUDART(DeviceGetAttribute)(int* value, int which, int) {
    static const std::map<int, int> known = {{1, 1024}, {2, 1024}, {3, 1024}, {4, 64}, {5, 0x7FFFFFFF}, {6, 65535}, {7, 65535}, {8, 49152}, {10, 32},
        {12, 65536}, {13, 1980000}, {16, 132}, {39, 2048}, {75, 9}, {76, 0}, {81, 233472}, {88, 0}, {97, 49152}, {100, 0}, {101, 0}, {115, 0}};
    auto found = known.find(which);
    return *value = found == known.end() ? 1 : found->second, OK;
}
// As CUDA 13 lays it out; CuPy copies it whole.
struct Properties {
    char name[256], uuid[32];
    size_t memory, block_shared;
    int block_registers, warp;
    size_t pitch;
    int block_threads, block_sizes[3], grid_sizes[3], gap;
    size_t constant;
    int major, minor;
    size_t texture[2];
    int multiprocessors, others[155];
};
static_assert(sizeof(Properties) == 1008);
CUDART(GetDeviceProperties)(Properties* p, int device) {
    if (device) return NO_DEVICE;
    *p = {};
    strcpy(p->name, "interpreted H100");
    memset(p->uuid, 0xC8, 16);
    p->memory = TOTAL;
    p->block_shared = MOST_SHARED;
    p->block_registers = 65536;
    p->warp = 32;
    p->block_threads = p->block_sizes[0] = p->block_sizes[1] = 1024;
    p->block_sizes[2] = 64;
    p->grid_sizes[0] = 0x7FFFFFFF;
    p->grid_sizes[1] = p->grid_sizes[2] = 65535;
    p->major = 9;
    p->multiprocessors = 132;
    return OK;
}
CUDART(DeviceSynchronize)() {
    LOCKED;
    int status = OK;
    for (auto& each : captures) status = spoil(each, UNSUPPORTED, "the device is waited for while a stream captures");
    if (status) return status;
    drain_all();
    return failed;
}
CUDART(MemGetInfo)(size_t* free, size_t* total) {
    *free = TOTAL - used;
    *total = TOTAL;
    return failed;
}
CUDART(Malloc)(void** at, size_t size) {
    LOCKED;
    *at = nullptr;
    if (failed || !size) return failed;
    if (int status = unsafe("cudaMalloc")) return status;
    if (used + size > TOTAL || !(*at = map_memory(size, false))) return NO_MEMORY;
    used += size;
    return OK;
}
CUDART(Free)(void* at) {
    LOCKED;
    if (!at) return failed;
    if (int status = unsafe("cudaFree")) return status;
    drain_all();
    const Range* found = around((uint64_t)at, 1);
    uint64_t size = found ? found->size : 0;
    if (!unmap_memory(at, false)) return refuse(INVALID, "memory to free that was not given");
    used -= size;
    return failed;
}
CUDART(HostAlloc)(void** at, size_t size, unsigned) {
    LOCKED;
    if (int status = unsafe("cudaHostAlloc")) return status;
    return (*at = map_memory(size, true)) ? OK : NO_MEMORY;
}
CUDART(FreeHost)(void* at) {
    LOCKED;
    drain_all();
    return unmap_memory(at, true) ? failed : INVALID;
}
struct Attributes {
    int type, device;
    const void *on_device, *on_host;
    long reserved[8];
};
CUDART(PointerGetAttributes)(Attributes* found, const void* at) {
    LOCKED;
    bool device = on_device(at), pinned = in_pinned(at);
    *found = {device ? 2 : pinned ? 1 : 0, device || pinned ? 0 : -2, device || pinned ? at : nullptr, device ? nullptr : at, {}};
    return OK;
}
CUDART(Memcpy)(void* to, const void* from, size_t size, int kind) {
    LOCKED;
    return copy(to, from, size, kind, nullptr, true);
}
CUDART(MemcpyAsync)(void* to, const void* from, size_t size, int kind, void* stream) {
    LOCKED;
    return copy(to, from, size, kind, stream, false);
}
CUDART(Memset)(void* at, int value, size_t size) {
    LOCKED;
    return fill(at, value, size, nullptr);
}
CUDART(MemsetAsync)(void* at, int value, size_t size, void* stream) {
    LOCKED;
    return fill(at, value, size, stream);
}

CUDART(StreamCreateWithFlags)(void** stream, unsigned flags) {
    LOCKED;
    auto* fresh = new Stream;
    fresh->blocking = !(flags & 1);
    streams.insert(fresh);
    return *stream = fresh, OK;
}
CUDART(StreamCreateWithPriority)(void** stream, unsigned flags, int) { return device_cudaStreamCreateWithFlags(stream, flags); }
CUDART(StreamCreate)(void** stream) { return device_cudaStreamCreateWithFlags(stream, 0); }
CUDART(StreamDestroy)(void* stream) {
    LOCKED;
    auto* s = (Stream*)stream;
    if (s->capture) spoil(s->capture, UNSUPPORTED, "a stream that captures is destroyed");
    drain(s);
    streams.erase(s);
    return OK;  // events may point to it: it stays
}
CUDART(StreamSynchronize)(void* stream) {
    LOCKED;
    Stream* s = stream_of(stream);
    if (s->capture) return spoil(s->capture, UNSUPPORTED, "a stream that captures is waited for");
    if (int status = beside_captures(s)) return status;
    for (Stream* each : streams)
        if (s == &null_stream && each->blocking) drain(each);
    drain(s);
    return failed;
}
CUDART(StreamQuery)(void* stream) {
    LOCKED;
    Stream* s = stream_of(stream);
    if (s->capture) return spoil(s->capture, UNSUPPORTED, "a stream that captures is asked whether it is done");
    if (int status = beside_captures(s)) return status;
    advance(s, s->done + 1);
    return failed ? failed : s->done < s->issued ? NOT_READY : OK;
}
CUDART(StreamBeginCapture)(void* stream, int how) {
    LOCKED;
    Stream* s = stream_of(stream);
    if (s == &null_stream) return refuse(UNSUPPORTED, "the default stream cannot capture");
    if (s->capture) return spoil(s->capture, ILLEGAL_STATE, "a stream captures already");
    s->capture = std::make_shared<Capture>(Capture{(CaptureMode)how, std::this_thread::get_id(), {s}, {}});
    captures.insert(s->capture);
    return OK;
}
CUDART(StreamEndCapture)(void* stream, Graph** graph) {
    LOCKED;
    Stream* s = stream_of(stream);
    *graph = nullptr;
    if (!s->capture) return refuse(ILLEGAL_STATE, "a stream does not capture");
    auto fresh = std::make_unique<Graph>();
    int status = end_capture(s, fresh.get());
    if (!status) *graph = fresh.release();
    return status;
}
CUDART(StreamIsCapturing)(void* stream, int* status) {
    LOCKED;
    Stream* s = stream_of(stream);
    *status = !s->capture ? 0 : s->capture->broken ? 2 : 1;
    return beside_captures(s);
}
using Instance = std::shared_ptr<const Graph>;  // launches that wait to be done have it, too
CUDART(GraphInstantiate)(Instance** instance, Graph* graph, unsigned long long) { return *instance = new Instance(new Graph(*graph)), OK; }
CUDART(GraphUpload)(Instance*, void*) { return failed; }
CUDART(GraphLaunch)(Instance* instance, void* stream) {
    LOCKED;
    if (failed) return failed;
    int status = enqueue(stream, [graph = *instance] {
        for (auto& work : *graph) work();
    });
    return status ? status : failed;
}
CUDART(GraphDestroy)(Graph* graph) { return delete graph, OK; }
CUDART(GraphExecDestroy)(Instance* instance) { return delete instance, OK; }

CUDART(StreamWaitEvent)(void* stream, Event* event, unsigned) {
    LOCKED;
    Stream* s = stream_of(stream);
    if (!event->stream) return OK;
    if (event->capture) {
        if (!event->capture->active) return refuse(CAPTURED_EVENT, "a wait for an event of a capture that is over");
        if (s->capture && s->capture != event->capture) return spoil(s->capture, MERGE, "a wait for an event of another capture");
        if (s == &null_stream) return spoil(event->capture, IMPLICIT, "the default stream waits for an event of a capture");
        if (!s->capture) event->capture->streams.push_back(s);
        s->capture = event->capture;
        s->last.insert(event->last.begin(), event->last.end());
        return OK;
    }
    if (s->capture) return spoil(s->capture, ISOLATION, "a stream that captures waits for an event from outside");
    push_wait(s, event->stream, event->place);
    return OK;
}
CUDART(EventCreateWithFlags)(Event** event, unsigned) { return *event = new Event, OK; }
CUDART(EventCreate)(Event** event) { return *event = new Event, OK; }
CUDART(EventDestroy)(Event* event) {
    delete event;
    return OK;
}
CUDART(EventRecord)(Event* event, void* stream) {
    LOCKED;
    Stream* s = stream_of(stream);
    if (!s->capture) {
        if (int status = beside_captures(s)) return status;
        meet_default(s);
    }
    *event = {s, s->issued, Clock::now(), s->capture, s->last};
    return failed;
}
int refuse_captured(Event* event) {
    if (!event->capture) return OK;
    if (event->capture->active) event->capture->broken = true;
    return refuse(CAPTURED_EVENT, "an event of a capture is waited for");
}
CUDART(EventQuery)(Event* event) {
    LOCKED;
    if (int status = refuse_captured(event)) return status;
    if (!event->stream) return OK;
    if (event->stream->done < event->place) advance(event->stream, event->stream->done + 1);
    return failed ? failed : event->stream->done < event->place ? NOT_READY : OK;
}
CUDART(EventSynchronize)(Event* event) {
    LOCKED;
    if (int status = refuse_captured(event)) return status;
    if (event->stream) advance(event->stream, event->place);
    return failed;
}
CUDART(EventElapsedTime)(float* ms, Event* first, Event* second) {
    if (!first->stream || !second->stream) return BAD_HANDLE;
    for (Event* each : {first, second})
        if (int status = refuse_captured(each)) return status;
    *ms = std::chrono::duration<float, std::milli>(second->time - first->time).count();
    return OK;
}
