#include "sampler.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

namespace tenure {
namespace {

constexpr float kNever = -std::numeric_limits<float>::infinity();
constexpr int kChunk = 256;  // logits looked at between decisions; long enough to be worth vector instructions

// Logits as integers in the same order, so that one integer pass finds the maximum and everything that is not a number.
constexpr int32_t kInfinityKey = 0x7f800000;
constexpr int32_t kMinusInfinityKey = ~kInfinityKey;

int32_t order_key(float logit) {
    const auto bits = std::bit_cast<int32_t>(logit);
    return bits ^ (bits >> 31 & 0x7fffffff);
}

// The maximum; false when the row holds a NaN or +inf, or nothing finite.
bool find_maximum(const float* logits, int vocab, float& most) {
    int32_t highest = kMinusInfinityKey, lowest = kInfinityKey;
    for (int i = 0; i < vocab; ++i) {
        const int32_t key = order_key(logits[i]);
        highest = key > highest ? key : highest;
        lowest = key < lowest ? key : lowest;
    }
    most = std::bit_cast<float>(highest ^ (highest >> 31 & 0x7fffffff));
    return highest < kInfinityKey && highest > kMinusInfinityKey && lowest >= kMinusInfinityKey;
}

int32_t first_equal(const float* logits, int vocab, float value) {
    int start = 0;
    for (; start + kChunk <= vocab; start += kChunk) {
        int equal = 0;
        for (int i = 0; i < kChunk; ++i) equal += logits[start + i] == value;
        if (equal > 0) break;
    }
    return static_cast<int32_t>(std::find(logits + start, logits + vocab, value) - logits);
}

// Uniform in [0, 1) from nothing but the row's own arguments.
double uniform(const SampleParams& params) {
    const uint32_t counter[4] = {params.position, params.stream, 0, 0};
    const uint32_t key[2] = {static_cast<uint32_t>(params.seed), static_cast<uint32_t>(params.seed >> 32)};
    uint32_t words[4];
    philox4x32(counter, key, words);
    return words[0] * 0x1p-32;
}

// e^-d for d >= 0, relative error below 5e-6 (1e-6 for d < 10), zero from d = 88 on. Ours rather than the C library's: it gives the same
// bits on every machine, and compilers turn it into vector instructions (no branch, no conversion that may trap).
inline float exp_minus(float d) {
    constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it leaves the nearest integer in the low bits
    constexpr float kZeroFrom = 88.0f;       // e^-88 is 2^-127, written as zero below
    // Not negative, so that its bits order as it does: a minimum of integers.
    const int32_t bits = std::min(std::bit_cast<int32_t>(d), std::bit_cast<int32_t>(kZeroFrom));
    const float t = std::bit_cast<float>(bits) * -1.44269504f;
    const float shifted = t + kRound;
    const float f = (t - (shifted - kRound)) * 0.693147181f;
    const float series = 1 + f * (1 + f * (1 / 2.f + f * (1 / 6.f + f * (1 / 24.f + f * (1 / 120.f + f / 720)))));
    const int32_t whole = std::bit_cast<int32_t>(shifted) - std::bit_cast<int32_t>(kRound);
    return series * std::bit_cast<float>((whole + 127) << 23);
}

// A token and the one order of tokens: higher logit first, equal logits by lower id.
struct Token {
    float logit;
    int32_t id;
};

bool before(const Token& a, const Token& b) { return a.logit > b.logit || (a.logit == b.logit && a.id < b.id); }

// One row on its way to a token. Unnormalised probabilities are relative to the maximum's, which is 1. A cut is the last
// token kept in that order; cutting zeroes the weights beyond it, and the draw walks the weights in order of ids.
class Row {
public:
    Row(const float* logits, int vocab, float most, float inverse)
        : logits_(logits), vocab_(vocab), most_(most), inverse_(inverse), weights_(spare_.weights) {
        weights_.resize(vocab);
        float* out = weights_.data();
        for (int i = 0; i < vocab; ++i) out[i] = exp_minus((most - logits[i]) * inverse);
    }

    // Weights are relative to the maximum's already.
    void keep_min_p(float min_p) {
        for (int i = 0; i < vocab_; ++i) weights_[i] = weights_[i] < min_p ? 0.0f : weights_[i];
    }

    void keep_top_k(int32_t k) {
        cut(k, [this](int32_t id) { return weights_[id] > 0.0f ? 1.0 : 0.0; });
    }

    // Keeps the fewest tokens whose mass reaches top_p of what is left.
    void keep_top_p(float top_p) {
        cut(top_p * mass(), [this](int32_t id) { return double(weights_[id]); });
    }

    int32_t draw(double u) const {
        const double target = u * mass();
        double seen = 0;
        int32_t last = -1;
        for (int start = 0; start < vocab_; start += kChunk) {
            const double here = chunk_mass(start);
            if (seen + here <= target) {
                seen += here;
                continue;
            }
            for (int i = start; i < std::min(vocab_, start + kChunk); ++i) {
                seen += weights_[i];
                if (weights_[i] > 0.0f) last = i;
                if (seen > target) return i;
            }
        }
        // Only when rounding left the running sum a hair below the target: the last token that can be chosen.
        for (int i = vocab_ - 1; last < 0; --i) {
            if (weights_[i] > 0.0f) last = i;
        }
        return last;
    }

private:
    static constexpr int kBins = 1024;
    static constexpr float kRange = 32.0f;  // distance to the maximum, in units of temperature; the last bin holds the rest

    // The bin of every token, for the histogram of a cut.
    const uint16_t* fill_bins() const {
        spare_.bins.resize(vocab_);
        uint16_t* out = spare_.bins.data();
        for (int i = 0; i < vocab_; ++i) {
            const float at = (most_ - logits_[i]) * inverse_ * (kBins / kRange);
            // A minimum of integers again, and so no branch.
            const int32_t bits = std::min(std::bit_cast<int32_t>(at), std::bit_cast<int32_t>(float(kBins - 1)));
            out[i] = static_cast<uint16_t>(static_cast<int32_t>(std::bit_cast<float>(bits)));
        }
        return out;
    }

    // Keeps the first tokens, in order, whose measures add up to `wanted`; all when they never do. A histogram finds the
    // bin in which that happens, and only the tokens of this bin are put in order.
    template <class Measure>
    void cut(double wanted, Measure measure) {
        const uint16_t* bin = fill_bins();
        double sums[kBins] = {};
        for (int32_t id = 0; id < vocab_; ++id) sums[bin[id]] += measure(id);
        int at = 0;
        while (at < kBins && sums[at] < wanted) wanted -= sums[at++];
        if (at == kBins) return;
        std::vector<Token> found;
        for (int32_t id = 0; id < vocab_; ++id) {
            if (bin[id] == at && weights_[id] > 0.0f) found.push_back({logits_[id], id});
        }
        cut_after(token_reaching(found, wanted, measure));
    }

    // The token at which the running sum of measures reaches `wanted`; by halving, not by sorting.
    template <class Measure>
    static Token token_reaching(std::vector<Token>& found, double wanted, Measure measure) {
        auto first = found.begin(), last = found.end();
        while (last - first > 1) {
            const auto middle = first + (last - first) / 2;
            std::nth_element(first, middle, last, before);
            double upper = 0;
            for (auto token = first; token != middle; ++token) upper += measure(token->id);
            if (upper >= wanted) {
                last = middle;
            } else {
                wanted -= upper;
                first = middle;
            }
        }
        return *first;
    }

    void cut_after(const Token& last) {
        float* weights = weights_.data();
        for (int i = 0; i < vocab_; ++i) {
            const bool kept = (logits_[i] > last.logit) | ((logits_[i] == last.logit) & (i <= last.id));
            weights[i] = kept ? weights[i] : 0.0f;
        }
    }

    // Eight running sums, so that the additions need not wait for each other.
    double chunk_mass(int start) const {
        double sums[8] = {};
        const int end = std::min(vocab_, start + kChunk);
        for (; start + 8 <= end; start += 8) {
            for (int j = 0; j < 8; ++j) sums[j] += weights_[start + j];
        }
        for (int j = 0; start + j < end; ++j) sums[j] += weights_[start + j];
        return ((sums[0] + sums[4]) + (sums[1] + sums[5])) + ((sums[2] + sums[6]) + (sums[3] + sums[7]));
    }

    double mass() const {
        double sum = 0;
        for (int start = 0; start < vocab_; start += kChunk) sum += chunk_mass(start);
        return sum;
    }

    // Room for one row of every thread, kept between rows.
    struct Spare {
        std::vector<float> weights;
        std::vector<uint16_t> bins;
    };
    static thread_local Spare spare_;

    const float* logits_;
    int vocab_;
    float most_, inverse_;
    std::vector<float>& weights_;
};

thread_local Row::Spare Row::spare_;

int32_t choose_token(const float* logits, int vocab, const SampleParams& params) {
    float most;
    if (!find_maximum(logits, vocab, most)) return -1;
    const float inverse = 1.0f / params.temperature;  // infinite for 0 and for temperatures too small to tell from 0
    if (!(params.temperature > 0.0f) || std::isinf(inverse) || params.top_k == 1) {
        return first_equal(logits, vocab, most);
    }
    Row row(logits, vocab, most, inverse);
    if (params.min_p > 0.0f) row.keep_min_p(params.min_p);
    if (params.top_k > 0 && params.top_k < vocab) row.keep_top_k(params.top_k);
    if (params.top_p < 1.0f) row.keep_top_p(params.top_p);
    return row.draw(uniform(params));
}

// The bits of the 32 tokens from `start` on.
uint32_t allowed_from(const uint32_t* allowed, int start, int vocab) {
    const uint32_t bits = allowed[start / 32];
    return vocab - start < 32 ? bits & ((1u << (vocab - start)) - 1) : bits;
}

// The logits of allowed tokens, in order, into `out` [vocab + 1]; how many there are.
int gather_allowed(const float* logits, int vocab, const uint32_t* allowed, float* out) {
    constexpr int kFew = 8;  // of 32: from here on looking at each is quicker than looking for the next
    int count = 0;
    for (int start = 0; start < vocab; start += 32) {
        const float* from = logits + start;
        uint32_t bits = allowed_from(allowed, start, vocab);
        if (bits == ~0u) {
            std::memcpy(out + count, from, 32 * sizeof(float));
            count += 32;
        } else if (std::popcount(bits) > kFew) {
            for (int i = 0; i < std::min(32, vocab - start); ++i) {
                out[count] = from[i];
                count += bits >> i & 1;
            }
        } else {
            for (; bits != 0; bits &= bits - 1) out[count++] = from[std::countr_zero(bits)];
        }
    }
    return count;
}

// The id of the allowed token that has `before` others before it.
int32_t allowed_after(const uint32_t* allowed, int32_t before) {
    int word = 0;
    while (before >= std::popcount(allowed[word])) before -= std::popcount(allowed[word++]);
    uint32_t bits = allowed[word];
    for (; before > 0; --before) bits &= bits - 1;
    return 32 * word + std::countr_zero(bits);
}

int32_t choose_allowed(const float* logits, int vocab, const SampleParams& params) {
    if (params.allowed == nullptr) return choose_token(logits, vocab, params);
    static thread_local std::vector<float> kept;
    kept.resize(vocab + 1);
    const int count = gather_allowed(logits, vocab, params.allowed, kept.data());
    const int32_t chosen = choose_token(kept.data(), count, params);
    return chosen < 0 ? chosen : allowed_after(params.allowed, chosen);
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
    team.run(rows, [&](int row, int) { out[row] = choose_allowed(logits + int64_t(row) * vocab, vocab, params[row]); });
}

}  // namespace tenure
