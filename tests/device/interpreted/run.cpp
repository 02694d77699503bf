// Running a kernel: block after block, warp after warp, thread after thread, each until it ends or waits for others.
#include <algorithm>
#include <cstring>

#include "work.h"

namespace ptx {

void fail(const Thread& t, int code, const std::string& what) {
    const Kernel& k = *t.block->kernel;
    const unsigned* at = t.block->place;
    std::string where = "(" + std::to_string(at[0]) + ", " + std::to_string(at[1]) + ", " + std::to_string(at[2]) + ")";
    throw Error{code, "kernel " + k.name + ", block " + where + ", thread " + std::to_string(t.number) + ": " + what + ", at " +
                          k.code[(size_t)t.pc - 1].text};
}

namespace {

class Machine {
  public:
    Machine(const Kernel& kernel, const Launch& launch) : k(kernel), l(launch) {
        count = l.block[0] * l.block[1] * l.block[2];
        block.kernel = &k;
        block.shared_bytes = k.shared_bytes + l.shared_bytes;
        shared.resize(block.shared_bytes / 16 + 17);
        block.shared = (uint8_t*)(((uint64_t)shared.data() + 127) / 128 * 128);
        registers.resize((size_t)count * (size_t)k.registers);
        frames.resize((size_t)count * (k.frame_bytes / 16 + 1));
        all.resize(count);
    }

    void run() {
        uint64_t blocks = (uint64_t)l.grid[0] * l.grid[1] * l.grid[2];
        for (uint64_t n = 0; n < blocks; ++n) {
            uint64_t at = l.backwards ? blocks - 1 - n : n;
            block.place[0] = (unsigned)(at % l.grid[0]);
            block.place[1] = (unsigned)(at / l.grid[0] % l.grid[1]);
            block.place[2] = (unsigned)(at / l.grid[0] / l.grid[1]);
            run_block();
        }
    }

  private:
    struct alignas(16) Piece {
        uint8_t bytes[16];
    };
    const Kernel& k;
    const Launch& l;
    Block block;
    unsigned count;
    std::vector<Piece> shared, frames;
    std::vector<uint64_t> registers;
    std::vector<Thread> all;

    // Own memory, and what nobody has written to, holds rubbish.
    void begin(unsigned n) {
        Thread& t = all[n];
        t = Thread{};
        t.r = &registers[(size_t)n * (size_t)k.registers];
        t.frame = frames[(size_t)n * (k.frame_bytes / 16 + 1)].bytes;
        t.block = &block;
        t.number = n;
        std::fill(t.r, t.r + k.registers, 0xDEADBEEFDEADBEEF);
        memset(t.frame, 0xFF, k.frame_bytes);
        memcpy(t.frame, l.arguments.data(), l.arguments.size());
        unsigned own[] = {n % l.block[0], n / l.block[0] % l.block[1], n / l.block[0] / l.block[1]};
        for (const Preset& each : k.presets) {
            uint64_t& to = t.r[each.slot];
            switch (each.source) {
                case CONSTANT: to = each.value; break;
                case OWN_FRAME: to = (uint64_t)t.frame + each.value; break;
                case TID: to = own[each.value]; break;
                case NTID: to = l.block[each.value]; break;
                case CTAID: to = block.place[each.value]; break;
                case NCTAID: to = l.grid[each.value]; break;
                case LANE: to = n % 32; break;
            }
        }
    }

    void advance(Thread& t) {
        const Ins* code = k.code.data();
        while (t.state == RUNS) {
            const Ins& i = code[t.pc++];
            if (i.guard && (t.r[i.guard] & 1) == i.unless) continue;
            i.work(t, i);
        }
    }

    void run_block() {
        memset(block.shared, 0xFF, block.shared_bytes);
        for (unsigned n = 0; n < count; ++n) begin(n);
        unsigned warps = (count + 31) / 32;
        do {
            for (unsigned n = 0; n < warps; ++n) {
                unsigned first = 32 * (l.backwards ? warps - 1 - n : n), lanes = std::min(32u, count - first);
                do {
                    for (unsigned lane = 0; lane < lanes; ++lane) advance(all[first + (l.backwards ? lanes - 1 - lane : lane)]);
                } while (release_warp(first, lanes));
            }
        } while (release_block());
    }

    // Lets lanes go on where all of their mask wait at one place; returns whether some did.
    bool release_warp(unsigned first, unsigned count) {
        bool any = false;
        for (unsigned lane = 0; lane < count; ++lane) {
            Thread& t = all[first + lane];
            if (t.state != AT_WARP) continue;
            const Ins& i = *t.at;
            uint32_t mask = (uint32_t)t.r[i.mode < 0 ? i.d : i.e];
            if (!(mask >> lane & 1)) fail(t, 715, "a lane that is not in its own mask");
            Thread* taking[32] = {};
            bool complete = true;
            for (unsigned other = 0; other < 32; ++other) {
                if (!(mask >> other & 1)) continue;
                if (other >= count || all[first + other].state == DONE) fail(t, 715, "a mask with lanes that are not there");
                taking[other] = &all[first + other];
                complete &= taking[other]->state == AT_WARP && taking[other]->at == t.at;
            }
            if (!complete) continue;
            shuffle(i, taking);
            for (Thread* each : taking)
                if (each) each->state = RUNS;
            any = true;
        }
        return any;
    }

    // Lets the block go on when all wait at one barrier; returns whether there is anybody left.
    bool release_block() {
        const Thread* one = nullptr;
        for (const Thread& t : all) {
            if (t.state == DONE) continue;
            if (t.state == AT_WARP) fail(t, 702, "lanes of a warp wait for one another at different places");
            if (one && t.at != one->at) fail(t, 715, "threads wait at different barriers");
            one = &t;
        }
        for (Thread& t : all)
            if (one && t.state == DONE) fail(*one, 715, "a barrier that some threads never come to");
            else if (one) t.state = RUNS;
        return one != nullptr;
    }
};

}  // namespace

void run(const Kernel& kernel, const Launch& launch) { Machine(kernel, launch).run(); }

}  // namespace ptx
