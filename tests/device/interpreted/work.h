// What instructions do.
#pragma once
#include <algorithm>

#include "ptx.h"

namespace ptx {

// An instruction's name with what stands behind it: "cvt.rn.f16.f32".
struct Form {
    std::string name;
    std::vector<std::string> parts, types;

    explicit Form(const std::vector<std::string>& given);
    bool has(const std::string& part) const { return std::find(parts.begin(), parts.end(), part) != parts.end(); }
};

size_t bytes_of(const std::string& type);      // 0 for what is none
Work work_of(const Form& form, Ins& ins);      // null for what is not known; sets what the work looks at
void copy_frame(Thread& t, const Ins& i);
void enter(Thread& t, const Ins& i);

enum State : uint8_t { RUNS, AT_BARRIER, AT_WARP, DONE };

struct Block;
struct Thread {
    uint64_t* r;
    uint8_t* frame;
    Block* block;
    unsigned number;
    int pc = 0;
    State state = RUNS;
    bool carry = false;
    const Ins* at = nullptr;  // where it waits
    std::vector<int> back;    // where functions return to
};

struct Block {
    const Kernel* kernel;
    uint8_t* shared;
    size_t shared_bytes;
    unsigned place[3];
};

[[noreturn]] void fail(const Thread& t, int code, const std::string& what);

// Lets the lanes of a warp that wait at a shuffle have their values. `lanes` are those of the mask, others are null.
void shuffle(const Ins& i, Thread* const (&lanes)[32]);

}  // namespace ptx
