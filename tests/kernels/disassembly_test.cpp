#include <cxxabi.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <map>
#include <memory>
#include <regex>
#include <string>
#include <vector>

#include "common/storage.hpp"
#include "stepgraph/kernels/signature.hpp"
#include "stepgraph/kernels/tensor_table.hpp"
#include "stepgraph/math/adam.hpp"

// Reads the instructions of the compiled kernels. Needs cuobjdump, but no GPU.
namespace stepgraph {
namespace {

using ::testing::Contains;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

/// How often each opcode, with its modifiers, occurs in one kernel.
using opcode_counts = std::map<std::string, int>;

/// The disassembler: from the environment, else what was found when the build was configured.
std::string disassembler() {
  const char* const from_environment = std::getenv("STEPGRAPH_CUOBJDUMP");
  if (from_environment != nullptr && *from_environment != '\0') return from_environment;
  return STEPGRAPH_CUOBJDUMP;
}

std::string demangled(const std::string& symbol) {
  int status = 0;
  const std::unique_ptr<char, decltype(&std::free)> name(
      abi::__cxa_demangle(symbol.c_str(), nullptr, nullptr, &status), &std::free);
  return status == 0 ? name.get() : symbol;
}

/// The kernels of an object file or archive by demangled name.
std::map<std::string, opcode_counts> disassemble(const std::string& file) {
  const std::string command =
      "'" + disassembler() + "' -sass -arch sm_90 '" + file + "' 2>/dev/null";
  const std::unique_ptr<FILE, decltype(&pclose)> output(popen(command.c_str(), "r"), &pclose);
  std::map<std::string, opcode_counts> kernels;
  opcode_counts* kernel = nullptr;
  char line[4096];
  while (output != nullptr && std::fgets(line, sizeof(line), output.get()) != nullptr) {
    const std::string text = line;
    if (const auto start = text.find("Function : "); start != std::string::npos) {
      const auto end = text.find_last_not_of(" \n");
      kernel = &kernels[demangled(text.substr(start + 11, end - start - 10))];
      continue;
    }
    // "        /*0a10*/              @!P0 LDG.E.128 R4, desc[UR4][R2.64] ;"
    static const std::regex instruction(
        R"(^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*))");
    std::smatch match;
    if (kernel != nullptr && std::regex_search(text, match, instruction)) {
      ++(*kernel)[match[1].str()];
    }
  }
  return kernels;
}

/// Instructions whose opcode matches.
int count(const opcode_counts& kernel, const std::string& pattern) {
  const std::regex expression(pattern);
  int total = 0;
  for (const auto& [opcode, times] : kernel) {
    if (std::regex_match(opcode, expression)) total += times;
  }
  return total;
}

/// What an update kernel of this signature does wrong, in words; empty if nothing.
std::vector<std::string> complaints(const opcode_counts& kernel,
                                    const update_signature& signature) {
  std::vector<std::string> found;
  const auto forbid = [&](const std::string& pattern, const std::string& why) {
    if (const int times = count(kernel, pattern)) {
      found.push_back(why + ": " + std::to_string(times) + " instructions " + pattern);
    }
  };
  const auto require = [&](const std::string& pattern, int least, const std::string& why) {
    if (const int times = count(kernel, pattern); times < least) {
      found.push_back(why + ": " + std::to_string(times) + " instructions " + pattern +
                      ", expected " + std::to_string(least));
    }
  };

  forbid(R"(D(ADD|MUL|FMA|SETP|MNMX)\b.*|.*\bF64\b.*|MUFU\..*64H.*)", "double arithmetic");
  forbid(R"((LDL|STL)\b.*)", "local memory");
  // Generic accesses decide on the address space at run time.
  forbid(R"((LD|ST)\b.*)", "generic addressing");

  const bool has_master = signature.master != storage_format::none;
  int loads[2] = {};  // [0]: f32 operands, [1]: 16-bit operands
  int stores[2] = {};
  const auto add = [](int(&counts)[2], storage_format format) {
    if (format != storage_format::none) ++counts[element_size(format) == 4 ? 0 : 1];
  };
  add(loads, signature.gradient);
  add(loads, has_master ? signature.master : signature.parameter);
  add(stores, signature.parameter);
  add(stores, signature.master);
  for (const storage_format moment : {signature.exp_avg, signature.exp_avg_sq}) {
    add(loads, moment);
    add(stores, moment);
  }
  // Four elements of each operand in one access, in the vector path. The descriptors of chunk and
  // tensor and the terms of the group are wide loads too: at most so many.
  if (loads[0] != 0) loads[0] += (sizeof(tensor_descriptor) + sizeof(math::adam_terms)) / 16;
  if (loads[1] != 0) loads[1] += sizeof(chunk_descriptor) / 8;
  require(R"(LDG\.E(\.\w+)*\.128(\.\w+)*)", loads[0], "f32 operands are not loaded by 16 bytes");
  require(R"(LDG\.E(\.\w+)*\.64(\.\w+)*)", loads[1], "16-bit operands are not loaded by 8 bytes");
  require(R"(STG\.E(\.\w+)*\.128(\.\w+)*)", stores[0], "f32 operands are not stored by 16 bytes");
  require(R"(STG\.E(\.\w+)*\.64(\.\w+)*)", stores[1], "16-bit operands are not stored by 8 bytes");
  return found;
}

std::string operand_in_demangled_name(storage_format format) {
  return "static_operand<(stepgraph::storage_format)" + std::to_string(static_cast<int>(format)) +
         ">";
}

/// The kernel that is instantiated for exactly this signature; null if there is none.
const opcode_counts* update_kernel_of(const std::map<std::string, opcode_counts>& kernels,
                                      const update_signature& signature) {
  for (const auto& [name, opcodes] : kernels) {
    if (name.find("update_kernel<") == std::string::npos) continue;
    std::size_t position = 0;
    bool matches = true;
    for (const storage_format format : {signature.parameter, signature.gradient, signature.master,
                                        signature.exp_avg, signature.exp_avg_sq}) {
      position = name.find("static_operand<", position);
      matches = matches && position != std::string::npos &&
                name.compare(position, operand_in_demangled_name(format).size(),
                             operand_in_demangled_name(format)) == 0;
      if (!matches) break;
      ++position;
    }
    if (matches) return &opcodes;
  }
  return nullptr;
}

class Disassembly : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!std::filesystem::exists(disassembler())) {
      GTEST_SKIP() << "no cuobjdump; set STEPGRAPH_CUOBJDUMP";
    }
    if (std::string(STEPGRAPH_CUDA_ARCHITECTURES).find("90") == std::string::npos) {
      GTEST_SKIP() << "kernels are not compiled for sm_90";
    }
  }
};

TEST_F(Disassembly, TunedUpdateKernelsStreamInSinglePrecisionByWideAccesses) {
  const auto kernels = disassemble(STEPGRAPH_KERNELS_FILE);
  for (const update_signature& signature : test::supported_signatures()) {
    if (!is_tuned(signature)) continue;
    const opcode_counts* const kernel = update_kernel_of(kernels, signature);
    ASSERT_NE(kernel, nullptr) << "no kernel of its own for " << name_of(signature);
    EXPECT_THAT(complaints(*kernel, signature), IsEmpty()) << name_of(signature);
  }
}

TEST_F(Disassembly, ChecksRejectAKernelThatDoesEverythingWrong) {
  const auto kernels = disassemble(STEPGRAPH_BAD_KERNELS_FILE);
  ASSERT_EQ(kernels.size(), 2u);
  for (const auto& [name, opcodes] : kernels) {
    const std::vector<std::string> found = complaints(opcodes, {});
    EXPECT_THAT(found, Contains(HasSubstr("not loaded by 16 bytes"))) << name;
    EXPECT_THAT(found, Contains(HasSubstr("not stored by 16 bytes"))) << name;
    EXPECT_THAT(found, Contains(HasSubstr(name.find("double_power") != std::string::npos
                                              ? "double arithmetic"
                                              : "local memory")))
        << name;
  }
}

}  // namespace
}  // namespace stepgraph
