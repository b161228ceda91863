#include "sampler.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

namespace tenure {
namespace {

constexpr float kNever = -std::numeric_limits<float>::infinity();

struct Candidate {
    float logit;
    int32_t id;
};

// The one order of tokens: higher logit first, equal logits by lower id.
bool before(const Candidate& a, const Candidate& b) { return a.logit > b.logit || (a.logit == b.logit && a.id < b.id); }

// Uniform in [0, 1) with 32 bits, from nothing but the row's own arguments.
double uniform(const SampleParams& params) {
    const uint32_t counter[4] = {params.position, params.stream, 0, 0};
    const uint32_t key[2] = {static_cast<uint32_t>(params.seed), static_cast<uint32_t>(params.seed >> 32)};
    uint32_t words[4];
    philox4x32(counter, key, words);
    return words[0] * 0x1p-32;
}

// The maximum, or NaN when the row holds a NaN or +inf, or nothing finite.
float checked_maximum(const float* logits, int vocab) {
    float most = kNever;
    bool bad = false;
    for (int i = 0; i < vocab; ++i) {
        most = logits[i] > most ? logits[i] : most;
        bad |= !(logits[i] < std::numeric_limits<float>::infinity());
    }
    return bad || most == kNever ? std::numeric_limits<float>::quiet_NaN() : most;
}

int32_t greedy(const float* logits, int vocab, float most) {
    return static_cast<int32_t>(std::find(logits, logits + vocab, most) - logits);
}

// Histogram over the distance to the maximum, in units of temperature: where a cut by rank or by mass falls is found in
// one pass, and only the tokens above it are ever collected and sorted.
class Histogram {
public:
    static constexpr int kBins = 1024;
    static constexpr float kRange = 32.0f;  // e^-32: everything further down shares the last bin

    Histogram(const float* logits, int vocab, float most, float inverse) : most_(most), inverse_(inverse) {
        for (int i = 0; i < vocab; ++i) {
            if (logits[i] == kNever) continue;
            const int at = bin(logits[i]);
            ++count_[at];
            mass_[at] += weight(logits[i]);
        }
    }

    float distance(float logit) const { return (most_ - logit) * inverse_; }
    double weight(float logit) const { return std::exp(-double(distance(logit))); }
    int bin(float logit) const {
        const float at = distance(logit) * (kBins / kRange);
        return at < kBins - 1 ? static_cast<int>(at) : kBins - 1;
    }

    // Last bin needed to hold at least `count` tokens.
    int bin_of_rank(int64_t count) const {
        int64_t seen = 0;
        for (int at = 0; at < kBins; ++at) {
            seen += count_[at];
            if (seen >= count) return at;
        }
        return kBins - 1;
    }

    // Last bin needed to hold at least `mass`.
    int bin_of_mass(double mass) const {
        double seen = 0;
        for (int at = 0; at < kBins; ++at) {
            seen += mass_[at];
            if (seen >= mass) return at;
        }
        return kBins - 1;
    }

    double total() const {
        double sum = 0;
        for (const double mass : mass_) sum += mass;
        return sum;
    }

private:
    float most_, inverse_;
    int32_t count_[kBins] = {};
    double mass_[kBins] = {};
};

// Keeps the first `rank` of the collected tokens and sorts them.
void keep_best(std::vector<Candidate>& found, int64_t rank) {
    if (rank < static_cast<int64_t>(found.size())) {
        std::nth_element(found.begin(), found.begin() + rank, found.end(), before);
        found.resize(rank);
    }
    std::sort(found.begin(), found.end(), before);
}

std::vector<Candidate> collect(const float* logits, int vocab, const Histogram& histogram, int last_bin) {
    std::vector<Candidate> found;
    for (int i = 0; i < vocab; ++i) {
        if (logits[i] != kNever && histogram.bin(logits[i]) <= last_bin) found.push_back({logits[i], i});
    }
    return found;
}

// Without cuts: walks the row in order of ids, no sorting.
int32_t draw_from_all(const float* logits, int vocab, const Histogram& histogram, double u) {
    double total = 0;
    for (int i = 0; i < vocab; ++i) {
        if (logits[i] != kNever) total += histogram.weight(logits[i]);
    }
    const double target = u * total;
    double seen = 0;
    int32_t last = -1;
    for (int i = 0; i < vocab; ++i) {
        if (logits[i] == kNever) continue;
        const double weight = histogram.weight(logits[i]);
        seen += weight;
        if (weight > 0) last = i;
        if (seen > target) return i;
    }
    return last;
}

// Over sorted candidates: cuts at top_p of their own mass, then walks down.
int32_t draw_from(const std::vector<Candidate>& found, const Histogram& histogram, double total, float top_p, double u) {
    std::size_t kept = found.size();
    double mass = 0;
    const double wanted = top_p < 1.0f ? double(top_p) * total : total;
    for (std::size_t i = 0; i < found.size(); ++i) {
        mass += histogram.weight(found[i].logit);
        if (top_p < 1.0f && mass >= wanted) {
            kept = i + 1;
            break;
        }
    }
    const double target = u * mass;
    double seen = 0;
    for (std::size_t i = 0; i < kept; ++i) {
        seen += histogram.weight(found[i].logit);
        if (seen > target) return found[i].id;
    }
    return found[kept - 1].id;
}

int32_t choose_token(const float* logits, int vocab, const SampleParams& params) {
    const float most = checked_maximum(logits, vocab);
    if (std::isnan(most)) return -1;
    if (!(params.temperature > 0.0f) || params.top_k == 1) return greedy(logits, vocab, most);
    const float inverse = 1.0f / params.temperature;
    if (std::isinf(inverse)) return greedy(logits, vocab, most);
    const Histogram histogram(logits, vocab, most, inverse);
    const double u = uniform(params);
    const bool by_rank = params.top_k > 0 && params.top_k < vocab;
    if (!by_rank && params.top_p >= 1.0f) return draw_from_all(logits, vocab, histogram, u);
    if (by_rank) {
        std::vector<Candidate> found = collect(logits, vocab, histogram, histogram.bin_of_rank(params.top_k));
        keep_best(found, params.top_k);
        double total = 0;
        for (const Candidate& candidate : found) total += histogram.weight(candidate.logit);
        return draw_from(found, histogram, total, params.top_p, u);
    }
    // One bin more than the mass asks for: the sums here and in the histogram round differently.
    const double total = histogram.total();
    const int last = std::min(histogram.bin_of_mass(params.top_p * total) + 1, Histogram::kBins - 1);
    std::vector<Candidate> found = collect(logits, vocab, histogram, last);
    keep_best(found, static_cast<int64_t>(found.size()));
    return draw_from(found, histogram, total, params.top_p, u);
}

}  // namespace

void philox4x32(const uint32_t counter[4], const uint32_t key[2], uint32_t out[4]) {
    uint32_t c[4], k[2];
    std::memcpy(c, counter, sizeof c);
    std::memcpy(k, key, sizeof k);
    for (int round = 0; round < 10; ++round) {
        const uint64_t a = uint64_t(0xD2511F53) * c[0], b = uint64_t(0xCD9E8D57) * c[2];
        const uint32_t next[4] = {uint32_t(b >> 32) ^ c[1] ^ k[0], uint32_t(b), uint32_t(a >> 32) ^ c[3] ^ k[1],
                                  uint32_t(a)};
        std::memcpy(c, next, sizeof c);
        k[0] += 0x9E3779B9;
        k[1] += 0xBB67AE85;
    }
    std::memcpy(out, c, sizeof c);
}

void sample(const float* logits, int vocab, const SampleParams* params, int rows, int32_t* out, Team& team) {
    team.run(rows, [&](int row, int) { out[row] = choose_token(logits + int64_t(row) * vocab, vocab, params[row]); });
}

}  // namespace tenure
