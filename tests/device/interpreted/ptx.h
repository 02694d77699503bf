// Kernels in PTX, the assembler that NVRTC makes of CUDA C++: read, and run on the host, one thread after another, with
// real barriers and shuffles.
#pragma once
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

namespace ptx {

struct Error {
    int code;  // CUDA's
    std::string text;
};

struct Thread;
struct Ins;
using Work = void (*)(Thread&, const Ins&);

enum Space : uint8_t { GENERIC, SHARED, FRAME };

// An instruction. Numbers are of registers, constants among them; register 0 is for what nobody wants.
struct Ins {
    Work work = nullptr;
    int d = 0, a = 0, b = 0, c = 0, e = 0;
    int more[4] = {};      // registers of a vector
    int count = 1;         // of them
    int guard = 0;         // the predicate that lets it run, or holds it back; 0: none
    bool unless = false;
    int64_t offset = 0;    // to an address; where a branch goes
    int mode = 0;          // which comparison, or shuffle, or reduction
    Space space = GENERIC;
    char round = 0;        // to an integer: n z m p
    char directed = 0;     // of a result: z m p, none for to nearest
    bool flush = false, saturate = false, unordered = false, carries = false, takes_carry = false;
    std::string text;
};

// What a register holds when a thread begins.
enum Source : uint8_t { CONSTANT, OWN_FRAME, TID, NTID, CTAID, NCTAID, LANE };
struct Preset {
    int slot;
    Source source;
    uint64_t value;  // a number, an offset, or an axis
};

struct Place {
    size_t offset, size;
};

// An entry with all functions that it calls, one behind the other. They have registers and frames of their own, so no
// function may call itself.
struct Kernel {
    std::string name;
    std::vector<Ins> code;
    std::vector<Preset> presets;
    std::vector<Place> parameters;
    int registers = 1;
    size_t frame_bytes = 0, shared_bytes = 0;
    unsigned most_threads = 1024;
};

struct Module {
    struct Function {
        std::string head, body;
    };
    std::map<std::string, Function> functions;
    std::map<std::string, Place> globals;  // by their addresses
    std::map<std::string, Place> shared;
    size_t shared_bytes = 0;
    std::map<std::string, std::unique_ptr<Kernel>> kernels;
    std::vector<std::unique_ptr<uint8_t[]>> memory;
};

struct Launch {
    unsigned grid[3], block[3];
    size_t shared_bytes;
    std::vector<uint8_t> arguments;
    bool backwards;  // the last block first, and the last thread of it
};

// All throw Error.
std::unique_ptr<Module> read(const std::string& text);
const Kernel& kernel(Module& module, const std::string& name);
void run(const Kernel& kernel, const Launch& launch);

// Whether so many bytes of the device's memory are there: the keeper of the memory says it.
bool reachable(uint64_t address, size_t size);
void remember(uint64_t address, size_t size);

}  // namespace ptx
