// Reading PTX: what stands in a module, and the instructions of a kernel.
#include <cctype>
#include <cstring>
#include <deque>
#include <unordered_map>

#include "ptx.h"
#include "work.h"

namespace ptx {
namespace {

using Words = std::vector<std::string>;

[[noreturn]] void refuse(const std::string& what) { throw Error{209, "PTX that the interpreter does not know: " + what}; }

std::string trimmed(const std::string& s) {
    size_t first = s.find_first_not_of(" \t\r\n"), last = s.find_last_not_of(" \t\r\n");
    return first == std::string::npos ? "" : s.substr(first, last - first + 1);
}

// Cuts at a character, but not within brackets.
Words cut(const std::string& s, const char* at) {
    Words found;
    std::string now;
    int depth = 0;
    for (char c : s) {
        depth += (strchr("([{", c) != nullptr) - (strchr(")]}", c) != nullptr);
        if (depth == 0 && strchr(at, c)) {
            found.push_back(trimmed(now));
            now.clear();
        } else now += c;
    }
    if (!trimmed(now).empty()) found.push_back(trimmed(now));
    return found;
}

Words words(const std::string& s) {
    Words found;
    for (auto& each : cut(s, " \t\r\n"))
        if (!each.empty()) found.push_back(each);
    return found;
}

std::string without_comments(const std::string& s) {
    std::string found;
    for (size_t p = 0; p < s.size(); ++p) {
        if (s.compare(p, 2, "//") == 0) p = std::min(s.find('\n', p), s.size() - 1);
        found += s[p];
    }
    return found;
}

// Where a bracket closes.
size_t end_of(const std::string& s, size_t open) {
    int depth = 0;
    for (size_t p = open; p < s.size(); ++p) {
        depth += (s[p] == '{' || s[p] == '(') - (s[p] == '}' || s[p] == ')');
        if (depth == 0) return p;
    }
    refuse("a bracket that stays open");
}

bool is_number(const std::string& s) { return isdigit((unsigned char)s[0]) || (s[0] == '-' && s.size() > 1); }

uint64_t number(const std::string& s) {
    if (s[0] == '-') return -number(s.substr(1));
    bool bits = s.size() > 2 && s[0] == '0' && strchr("fFdD", s[1]);
    return bits ? strtoull(s.c_str() + 2, nullptr, 16) : strtoull(s.c_str(), nullptr, 0);
}

struct Declared {
    std::string name;
    size_t bytes = 0, align = 0, unit = 0;
};

// ".align 8 .b8 name[16]"
Declared declared(const std::string& text) {
    Declared found;
    Words all = words(text);
    for (size_t k = 0; k < all.size(); ++k) {
        if (all[k] == ".align") found.align = number(all[++k]);
        else if (all[k][0] == '.') found.unit = std::max(found.unit, bytes_of(all[k].substr(1)));
        else found.name += all[k];
    }
    size_t open = found.name.find('[');
    found.bytes = found.unit;
    if (open != std::string::npos) {
        found.bytes *= number(found.name.substr(open + 1) + " ");
        found.name.resize(open);
    }
    found.align = std::max({found.align, found.unit, (size_t)1});
    return found;
}

Place take(size_t& used, size_t bytes, size_t align) {
    used = (used + align - 1) / align * align;
    Place place{used, bytes};
    used += bytes;
    return place;
}

void variable(Module& m, const std::string& text) {
    Words halves = cut(text, "=");
    Declared d = declared(halves.at(0));
    if (text.find(".shared") != std::string::npos) {
        if (!d.bytes) refuse("shared memory of any length, " + text);
        m.shared[d.name] = take(m.shared_bytes, d.bytes, d.align);
        return;
    }
    m.memory.emplace_back(new uint8_t[d.bytes + d.align + 16]());
    uint64_t at = ((uint64_t)m.memory.back().get() + d.align) / d.align * d.align;
    m.globals[d.name] = {at, d.bytes};
    remember(at, d.bytes);
    if (halves.size() < 2) return;
    std::string values = halves[1];
    if (values[0] == '{') values = values.substr(1, values.size() - 2);
    for (auto& each : cut(values, ",")) {
        uint64_t bits = number(each);
        memcpy((void*)at, &bits, d.unit);
        at += d.unit;
    }
}

std::string after(const std::string& text, const std::string& word) {
    size_t at = text.find(word);
    return at == std::string::npos ? "" : text.substr(at + word.size());
}

// A function's own name, and what it takes.
struct Head {
    std::string name;
    Words takes, gives;
};
Head head(const std::string& text) {
    Head found;
    bool entry = text.find(".entry") != std::string::npos;
    std::string rest = trimmed(after(text, entry ? ".entry" : ".func"));
    auto list = [&] {
        size_t end = end_of(rest, 0);
        Words found = cut(rest.substr(1, end - 1), ",");
        rest = trimmed(rest.substr(end + 1));
        return found;
    };
    if (rest[0] == '(') found.gives = list();
    size_t end = rest.find_first_of(" \t\r\n(");
    found.name = rest.substr(0, end);
    rest = end == std::string::npos ? "" : trimmed(rest.substr(end));
    if (!rest.empty() && rest[0] == '(') found.takes = list();
    return found;
}

// ---------------------------------------------------------------- a kernel's instructions

class Reader {
  public:
    Reader(Module& module, Kernel& kernel) : m(module), k(kernel) { k.shared_bytes = m.shared_bytes; }

    void entry(const std::string& name) {
        const Module::Function& f = m.functions.at(name);
        for (auto& each : head(f.head).takes) k.parameters.push_back(parameter(each));
        unsigned x = 1024, y = 1, z = 1;
        sscanf(after(f.head, ".maxntid").c_str(), "%u , %u , %u", &x, &y, &z);
        k.most_threads = x * y * z;
        body(f.body);
        while (!waiting.empty()) {
            std::string next = waiting.front();
            waiting.pop_front();
            Callee& callee = callees.at(next);
            callee.start = (int)k.code.size();
            registers.clear();
            places = callee.places;
            body(m.functions.at(next).body);
        }
        for (auto& [at, name] : calls) k.code[at].offset = callees.at(name).start;
    }

  private:
    struct Callee {
        std::vector<Place> takes, gives;
        std::map<std::string, Place> places;
        int start = -1;
    };
    Module& m;
    Kernel& k;
    std::unordered_map<std::string, int> registers;
    std::map<std::string, int> known;     // constants
    std::map<std::string, Place> places;  // in the frame
    std::map<std::string, Place> shared;
    std::map<std::string, Callee> callees;
    std::deque<std::string> waiting;
    std::vector<std::pair<size_t, std::string>> calls;

    Place parameter(const std::string& text) {
        Declared d = declared(after(text, ".param"));
        return places[d.name] = take(k.frame_bytes, d.bytes, d.align);
    }

    Callee& called(const std::string& name) {
        auto found = callees.find(name);
        if (found != callees.end()) return found->second;
        auto function = m.functions.find(name);
        if (function == m.functions.end() || function->second.body.empty()) refuse("a call of " + name);
        Callee& callee = callees[name];
        std::map<std::string, Place> own;
        std::swap(own, places);
        Head h = head(function->second.head);
        for (auto& each : h.takes) callee.takes.push_back(parameter(each));
        for (auto& each : h.gives) callee.gives.push_back(parameter(each));
        std::swap(own, places);
        callee.places = own;
        waiting.push_back(name);
        return callee;
    }

    void body(const std::string& s) {
        std::map<std::string, size_t> labels;
        std::vector<std::pair<size_t, std::string>> jumps;
        for (size_t p = 0; p < s.size();) {
            if (isspace((unsigned char)s[p]) || strchr("{};", s[p])) {
                ++p;
                continue;
            }
            size_t end = p;
            while (end < s.size() && !strchr(";:", s[end])) ++end;
            if (end < s.size() && s[end] == ':' && s.find_first_of(" \t\n.%", p) > end) {
                labels[s.substr(p, end - p)] = k.code.size();
            } else {
                end = std::min(s.find(';', p), s.size());
                std::string text = trimmed(s.substr(p, end - p));
                if (text[0] == '.') directive(text);
                else if (instruction(text)) jumps.emplace_back(k.code.size() - 1, words(text).back());
            }
            p = end + 1;
        }
        for (auto& [at, label] : jumps) {
            if (!labels.count(label)) refuse("a branch to " + label);
            k.code[at].offset = (int64_t)labels[label];
        }
        instruction("ret");
    }

    void directive(const std::string& text) {
        std::string kind = text.substr(0, text.find_first_of(" \t"));
        std::string rest = trimmed(text.substr(kind.size()));
        if (kind == ".reg") {
            for (auto& each : cut(trimmed(rest.substr(rest.find_first_of(" \t"))), ",")) {
                size_t open = each.find('<');
                size_t count = open == std::string::npos ? 1 : number(each.substr(open + 1) + " ");
                for (size_t n = 0; n < count; ++n) {
                    std::string name = open == std::string::npos ? each : each.substr(0, open) + std::to_string(n);
                    if (registers.emplace(name, k.registers).second) ++k.registers;
                }
            }
        } else if (kind == ".local" || kind == ".param") {
            Declared d = declared(rest);
            places[d.name] = take(k.frame_bytes, d.bytes, d.align);
        } else if (kind == ".shared") {
            Declared d = declared(rest);
            shared[d.name] = take(k.shared_bytes, d.bytes, d.align);
        } else if (kind != ".pragma" && kind != ".loc") refuse(text);
    }

    int preset(const std::string& key, Source source, uint64_t value) {
        auto [found, fresh] = known.emplace(key, k.registers);
        if (fresh) k.presets.push_back({k.registers++, source, value});
        return found->second;
    }

    // The register of an operand.
    int slot(const std::string& name) {
        if (name == "_") return 0;
        auto found = registers.find(name);
        if (found != registers.end()) return found->second;
        if (is_number(name)) return preset(name, CONSTANT, number(name));
        if (places.count(name)) return preset(std::to_string(places[name].offset) + " frame", OWN_FRAME, places[name].offset);
        if (shared.count(name)) return preset(name, CONSTANT, shared[name].offset);
        if (m.shared.count(name)) return preset(name, CONSTANT, m.shared[name].offset);
        if (m.globals.count(name)) return preset(name, CONSTANT, m.globals[name].offset);
        static const std::map<std::string, Source> axes = {{"%tid.", TID}, {"%ntid.", NTID}, {"%ctaid.", CTAID}, {"%nctaid.", NCTAID}};
        auto axis = axes.find(name.substr(0, name.size() - 1));
        if (axis != axes.end()) return preset(name, axis->second, name.back() - 'x');
        if (name == "%laneid") return preset(name, LANE, 0);
        refuse("the operand " + name);
    }

    // "{a, b}" or "a|b": their registers; else the one.
    void spread(const std::string& operand, Ins& i) {
        bool many = operand[0] == '{';
        Words parts = many ? cut(operand.substr(1, operand.size() - 2), ",") : cut(operand, "|");
        i.count = (int)parts.size();
        for (size_t n = 0; n < parts.size(); ++n) i.more[n] = slot(parts[n]);
    }

    void address(const std::string& operand, Ins& i) {
        std::string inner = trimmed(operand.substr(1, operand.size() - 2));
        size_t plus = inner.find('+', 1);
        i.a = slot(trimmed(inner.substr(0, plus)));
        if (plus != std::string::npos) i.offset = (int64_t)number(trimmed(inner.substr(plus + 1)));
    }

    void copy(const Place& to, const Place& from) {
        Ins i;
        i.work = copy_frame;
        i.a = (int)to.offset;
        i.b = (int)from.offset;
        i.c = (int)to.size;
        k.code.push_back(i);
    }

    void call(const Words& operands, Ins i) {
        Words gives, takes;
        std::string name;
        for (auto& each : operands) {
            Words inner = each[0] == '(' ? cut(each.substr(1, each.size() - 2), ",") : Words{};
            if (each[0] != '(') name = each;
            else (name.empty() ? gives : takes) = inner;
        }
        Callee& callee = called(name);
        for (size_t n = 0; n < takes.size(); ++n) copy(callee.takes.at(n), places.at(takes[n]));
        calls.emplace_back(k.code.size(), name);
        i.work = enter;
        k.code.push_back(i);
        for (size_t n = 0; n < gives.size(); ++n) copy(places.at(gives[n]), callee.gives.at(n));
    }

    // Adds an instruction; returns whether it is a branch, whose place is not known yet.
    bool instruction(std::string text) {
        Ins i;
        i.text = text;
        if (text[0] == '@') {
            size_t end = text.find_first_of(" \t");
            i.unless = text[1] == '!';
            i.guard = slot(text.substr(1 + i.unless, end - 1 - i.unless));
            text = trimmed(text.substr(end));
        }
        size_t end = text.find_first_of(" \t\r\n");
        Words parts = cut(text.substr(0, end), "."), operands;
        if (end != std::string::npos) operands = cut(text.substr(end), ",");
        Form form(parts);
        if (form.name == "call") {
            if (i.guard) refuse(text);
            call(operands, i);
            return false;
        }
        i.flush = form.has("ftz");
        i.saturate = form.has("sat");
        for (auto& each : parts)
            if (each[0] == 'r' && (each.size() == 2 || each == "rni" || each == "rzi" || each == "rmi" || each == "rpi")) {
                if (each.size() == 3) i.round = each[1];
                else if (each[1] != 'n') i.directed = each[1];
            }
        if (form.has("shared")) i.space = SHARED;
        if (form.has("local") || form.has("param")) i.space = FRAME;
        i.work = work_of(form, i);
        if (!i.work) refuse(text);
        if (form.name == "ld" || form.name == "atom" || form.name == "red") {
            bool result = form.name != "red";
            if (result) spread(operands.at(0), i);
            address(operands.at(result), i);
            if (operands.size() > 1u + result) i.b = slot(operands[1 + result]);
            if (operands.size() > 2u + result) i.c = slot(operands[2 + result]);
        } else if (form.name == "st") {
            address(operands.at(0), i);
            spread(operands.at(1), i);
        } else if (form.name == "mov" && operands.at(1)[0] == '{') {
            spread(operands[1], i);
            i.d = slot(operands[0]);
            i.mode = 1;
        } else if (form.name == "bra") {
            k.code.push_back(i);
            return true;
        } else if (!operands.empty()) {
            spread(operands[0], i);
            i.d = i.more[0];
            int* places[] = {&i.a, &i.b, &i.c, &i.e};
            for (size_t n = 1; n < operands.size(); ++n) {
                if (n > 4) refuse(text);
                *places[n - 1] = slot(operands[n]);
            }
        }
        k.code.push_back(i);
        return false;
    }
};

}  // namespace

std::unique_ptr<Module> read(const std::string& text) {
    auto m = std::make_unique<Module>();
    std::string s = without_comments(text);
    for (size_t p = 0; (p = s.find_first_not_of(" \t\r\n", p)) != std::string::npos;) {
        std::string word = s.substr(p, s.find_first_of(" \t\r\n", p) - p);
        if (word == ".version" || word == ".target" || word == ".address_size" || word == ".file") {
            p = std::min(s.find('\n', p), s.size());
            continue;
        }
        size_t stop = s.find_first_of(";{=", p);
        if (stop == std::string::npos) break;
        std::string text = s.substr(p, stop - p);
        bool function = text.find(".entry") != std::string::npos || text.find(".func") != std::string::npos;
        if (function && s[stop] == '{') {
            size_t end = end_of(s, stop);
            m->functions[head(text).name] = {text, s.substr(stop + 1, end - stop - 1)};
            p = end + 1;
        } else {
            size_t end = std::min(s.find(';', stop), s.size());
            if (!function) variable(*m, s.substr(p, end - p));
            p = end + 1;
        }
    }
    return m;
}

const Kernel& kernel(Module& m, const std::string& name) {
    auto& found = m.kernels[name];
    if (!found) {
        if (!m.functions.count(name)) throw Error{500, "the module has no kernel " + name};
        auto fresh = std::make_unique<Kernel>();
        fresh->name = name;
        Reader(m, *fresh).entry(name);
        found = std::move(fresh);
    }
    return *found;
}

}  // namespace ptx
