// A compilation that needs much memory: containers of many types, all instantiated.
// The object file must not depend on how the compiler's memory was managed.
#include <algorithm>
#include <functional>
#include <map>
#include <numeric>
#include <regex>
#include <set>
#include <string>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <variant>
#include <vector>

template <int Number> struct Tag {
    int value = Number;
    bool operator<(const Tag &other) const { return value < other.value; }
    bool operator==(const Tag &other) const { return value == other.value; }
};

template <int Number> struct Work {
    static long run(long seed) {
        std::map<Tag<Number>, std::vector<std::string>> names;
        std::set<std::pair<Tag<Number>, long>> pairs;
        std::unordered_map<std::string, std::tuple<Tag<Number>, long, double>> table;
        std::vector<std::variant<long, Tag<Number>, std::string>> mixed;
        for (long i = 0; i < seed; i++) {
            Tag<Number> tag;
            tag.value += static_cast<int>(i);
            names[tag].push_back(std::to_string(i));
            pairs.insert({tag, i * seed});
            table[std::to_string(i)] = std::make_tuple(tag, i, i * 0.5);
            mixed.emplace_back(i);
            mixed.emplace_back(tag);
        }
        std::sort(mixed.begin(), mixed.end(), [](const auto &a, const auto &b) { return a.index() < b.index(); });
        std::function<long(long)> step = [&](long x) { return x + static_cast<long>(pairs.size() + table.size()); };
        return std::accumulate(mixed.begin(), mixed.end(), step(seed),
                               [](long sum, const auto &one) { return sum + static_cast<long>(one.index()); }) +
               Work<Number - 1>::run(seed);
    }
};

template <> struct Work<0> {
    static long run(long seed) { return seed; }
};

#ifndef INSTANCES
#define INSTANCES 6
#endif

long everything(long seed) { return Work<INSTANCES>::run(seed); }
